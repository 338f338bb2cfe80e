#!/usr/bin/env python3
"""Follows every link between the documents: to a file that is there, and to a heading that it has.

Ends with the line `N passed, N failed`, which counts links. Links to other places of the net are
not followed.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
_NOT_OURS = {".git", ".deps", "target"}
_CODE = re.compile(r"```.*?```", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def documents() -> Iterator[pathlib.Path]:
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in _NOT_OURS]
        yield from (pathlib.Path(folder) / name for name in files if name.endswith(".md"))


@functools.cache
def anchors(document: pathlib.Path) -> frozenset[str]:
    """What GitHub makes of the headings."""
    headings = _HEADING.findall(_CODE.sub("", document.read_text()))
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings)


def is_right(document: pathlib.Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (document.parent / path).resolve() if path else document
    if not target.exists():
        return False
    return not anchor or target.suffix != ".md" or anchor in anchors(target)


def main() -> int:
    passed = failed = 0
    for document in sorted(documents()):
        for link in _LINK.findall(_CODE.sub("", document.read_text())):
            if link.startswith(("http:", "https:", "mailto:")):
                continue
            if is_right(document, link):
                passed += 1
            else:
                failed += 1
                print(f"{document.relative_to(ROOT)}: nothing at {link}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
