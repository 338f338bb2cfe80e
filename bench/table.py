#!/usr/bin/env python3
"""Writes the tables of the documents from results.csv, so that no number in them is typed by hand.

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`, where NAME is an entry of TABLES.
--check changes nothing and fails if one is out of date.
"""

import argparse
import pathlib
import re
import sys
from collections.abc import Callable, Sequence

import results
import rows
import tables_layouts
import tables_other
import tables_run
import tables_sweep

DOCUMENTS = tuple(rows.ROOT / name for name in (
    "README.md", "docs/performance.md", "docs/several-nodes.md", "docs/development/host-time.md"))
_BLOCK = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

TABLES: dict[str, Callable[[Sequence[results.Row]], str]] = {
    **tables_run.TABLES, **tables_sweep.TABLES, **tables_other.TABLES, **tables_layouts.TABLES}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("documents", nargs="*", type=pathlib.Path, default=DOCUMENTS,
                        metavar="FILE", help="(all that have tables)")
    parser.add_argument("--check", action="store_true", help="fail if a document would change")
    arguments = parser.parse_args()
    all_rows = results.load()
    outdated = 0
    for document in arguments.documents:
        before = document.read_text()
        after = fill(before, all_rows)
        if arguments.check and before != after:
            print(f"{document}: tables are out of date, run bench/table.py")
            outdated = 1
        elif not arguments.check:
            document.write_text(after)
    return outdated


def fill(document: str, all_rows: Sequence[results.Row]) -> str:
    """The document with every marked table made anew."""
    return _BLOCK.sub(lambda match: match[1] + TABLES[match[2]](all_rows) + match[3], document)


if __name__ == "__main__":
    sys.exit(main())
