#!/usr/bin/env python3
"""Draws docs/plots/*.svg: one picture for each mode and number of ranks with any figure, and
those of the scale model, and those of the guide.

Times of other libraries come from records.json; a point without a line is a single figure.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

import data
import diagrams
import plot_ht
import plot_ll
import plot_run
import plot_scale

PLOTS = data.ROOT / "docs" / "plots"
_DRAW = {"ll": plot_ll.draw, "ht": plot_ht.draw}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", nargs="*", type=pathlib.Path, default=data.result_files(),
                        metavar="FILE", help="result files (all in bench/results)")
    parser.add_argument("--out", type=pathlib.Path, default=PLOTS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    drawn = draw_all(data.load_runs(arguments.results), data.load_records())
    for name, picture in drawn.items():
        (arguments.out / name).write_text(picture)
        print(arguments.out / name)
    return 0


def draw_all(runs: list[data.Run], records: dict[str, Any]) -> dict[str, str]:
    """Pictures by file name."""
    drawn = {**plot_scale.draw_all(), **diagrams.draw_all(), "one-run.svg": plot_run.draw(records)}
    for algorithm, draw in _DRAW.items():
        ours = [run for run in runs if run.algorithm == algorithm and not run.uneven]
        known = {record["ranks"] for record in records["records"]
                 if record["algorithm"] == algorithm}
        for ranks in sorted(known | {run.ranks for run in ours}):
            chosen = [run for run in ours if run.ranks == ranks]
            drawn[f"{algorithm}-{ranks}-ranks.svg"] = draw(ranks, chosen, records)
    return drawn


if __name__ == "__main__":
    sys.exit(main())
