#!/usr/bin/env python3
"""Runs every check of the project and ends with the line `N passed, N failed`.

Needs only Python's standard library and what setup.sh installs. Steps run side by side where the
machine allows; the output of a step is shown when it fails. docs/testing.md says what is where.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import sys
import time
from collections.abc import Sequence

from testing import catalogue, command, pool, programs
from testing.step import Places, Step


def main() -> int:
    arguments = _parse_arguments()
    environment = command.build_environment()
    gpus = int(environment["NCCL_EP_GPUS"])
    target = pathlib.Path(environment["NCCL_EP_TARGET"])
    places = Places(environment, target, target / "c" / ("gpu" if arguments.gpu else "host"), gpus)
    if arguments.gpu and gpus == 0 and not arguments.list:
        print("no GPU on this machine: nothing to run")
        return 0

    steps = _select(_known_steps(places, arguments), arguments.only)
    if not steps:
        sys.exit(f"no step matches {', '.join(arguments.only)}; --list shows all")
    if arguments.list:
        print("\n".join(step.name for step in steps))
        return 0
    return _run(steps, places, arguments)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="WORD", action="append", default=[],
                        help="run the steps with a word in their name that starts with WORD, "
                             "and what they need; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the names of the steps")
    parser.add_argument("--gpu", action="store_true",
                        help="run the C programs on the GPUs of this machine instead")
    parser.add_argument("--no-build", action="store_true",
                        help="with --gpu: take the programs as they are")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1,
                        help="how many cores to fill (%(default)s)")
    parser.add_argument("-v", "--verbose", action="store_true",
                        help="show the output of every step")
    return parser.parse_args()


def _known_steps(places: Places, arguments: argparse.Namespace) -> list[Step]:
    if not arguments.gpu:
        return catalogue.all_steps(places)
    if arguments.no_build:
        return programs.gpu_steps(places, ())
    builds = catalogue.gpu_builds(places)
    return [*builds, *programs.gpu_steps(places, [step.name for step in builds])]


def _select(steps: Sequence[Step], words: Sequence[str]) -> list[Step]:
    """The steps that match, and all that they need, in the given order."""
    if not words:
        return list(steps)
    # A word starts after anything that is no letter or digit, so that "ll" is not in "install".
    pattern = re.compile("|".join(rf"(?<![a-z0-9]){re.escape(word)}" for word in words))
    wanted = {step.name for step in steps if pattern.search(step.name)}
    for step in reversed(steps):
        if step.name in wanted:
            wanted.update(step.needs)
    return [step for step in steps if step.name in wanted]


def _run(steps: Sequence[Step], places: Places, arguments: argparse.Namespace) -> int:
    def report(outcome: pool.Outcome) -> None:
        counts = outcome.counts
        state = "ok    " if counts.ok else "FAILED"
        text = counts.problem or (f"{counts.passed} passed" if counts.passed else "")
        if counts.failed and not counts.problem:
            text = f"{counts.passed} passed, {counts.failed} failed"
        print(f"{state} {outcome.seconds:6.1f} s  {outcome.step.name:34} {text}".rstrip())
        if outcome.output and (arguments.verbose or not counts.ok):
            if not callable(outcome.step.command):
                print(f"    $ {' '.join(outcome.step.command)}")
            print("\n".join(f"    | {line}" for line in outcome.output.splitlines()))
        sys.stdout.flush()

    start = time.monotonic()
    outcomes = pool.run_steps(steps, places.environment, max(arguments.cores, 1), report)
    _print_summary(outcomes, time.monotonic() - start)
    return 1 if any(not outcome.counts.ok for outcome in outcomes) else 0


def _print_summary(outcomes: Sequence[pool.Outcome], seconds: float) -> None:
    broken = [outcome.step.name for outcome in outcomes if not outcome.counts.ok]
    slowest = sorted(outcomes, key=lambda outcome: -outcome.seconds)[:5]
    print(f"\n{len(outcomes)} steps in {seconds:.0f} s; the longest: "
          + ", ".join(f"{each.step.name} {each.seconds:.0f} s" for each in slowest))
    if broken:
        print("failed steps: " + ", ".join(broken))
    print(f"{sum(outcome.counts.passed for outcome in outcomes)} passed, "
          f"{sum(outcome.counts.failed for outcome in outcomes)} failed")


if __name__ == "__main__":
    sys.exit(main())
