#!/usr/bin/env python3
"""Runs the checks that need no GPU, by default those of `make test`, and ends with the line `N passed, N failed`.

Needs Python's standard library and what setup.sh installs. Steps run in parallel where the machine
allows; a step's output is shown if it fails. docs/testing.md lists what is tested where.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time

from testing import catalogue, command, pool, report, tiers
from testing.step import Places


def main() -> int:
    arguments = _parse_arguments()
    environment = command.build_environment()
    target = pathlib.Path(environment["NCCL_EP_TARGET"])
    # What Python programs load is compiled once, beside the other things that are made.
    environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(target / "pycache")}
    places = Places(environment, target, target / "c" / "host")
    steps = catalogue.all_steps(places)
    if not arguments.only:
        steps = tiers.unnamed(steps) if arguments.all else tiers.usual(steps)
    steps = report.select(steps, arguments.only)
    if not steps:
        sys.exit(f"no step matches {', '.join(arguments.only)}; --list shows all")
    if arguments.list:
        print("\n".join(step.name for step in steps))
        return 0
    steps = catalogue.only_needed(steps, places)
    start = time.monotonic()
    outcomes = pool.run_steps(steps, environment, max(arguments.cores, 1),
                              lambda outcome: report.print_outcome(outcome, arguments.verbose),
                              fill=True)
    report.print_summary(outcomes, time.monotonic() - start)
    return 1 if any(not outcome.counts.ok for outcome in outcomes) else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="run all steps, also those that take long and show little "
                        "that others do not (testing/tiers.py)")
    parser.add_argument("--only", metavar="WORD", action="append", default=[],
                        help="run those of all steps with a word in their name that starts with WORD, and "
                             "build what they need; sanitize/... only if WORD begins like it; may "
                             "be repeated")
    parser.add_argument("--list", action="store_true", help="print the names of the steps")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="how many cores to fill (%(default)s)")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the output of every step")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
