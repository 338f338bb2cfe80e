"""The runners' report: one line per step, the output of failed ones, and the sums.

Also the choice of steps by --only, which both runners share.
"""

from __future__ import annotations

import collections
import re
import sys
from collections.abc import Sequence

from testing.pool import Outcome
from testing.step import Step

# Of the output of a step without which others did not run.
_CAUSE_LINES = 20


def select(steps: Sequence[Step], words: Sequence[str]) -> list[Step]:
    """The steps that match a word, and the steps that these need, in the given order."""
    if not words:
        return list(steps)
    # A match starts a word, so that "ll" does not match "install".
    pattern = re.compile("|".join(rf"(?<![a-z0-9]){re.escape(word)}" for word in words))
    # The sanitizers build everything a second time, so they want to be named themselves.
    wanted = {step.name for step in steps
              if (pattern.match if step.name.startswith("sanitize/") else pattern.search)(step.name)}
    for step in reversed(steps):
        if step.name in wanted:
            wanted.update(step.needs)
    return [step for step in steps if step.name in wanted]


def print_outcome(outcome: Outcome, verbose: bool) -> None:
    """Prints one line, and the output of a failed step. The summary counts what did not run."""
    counts = outcome.counts
    if counts.not_run:
        return
    nothing_ran = counts.skipped and counts.passed + counts.failed == 0
    state = "FAILED" if not counts.ok else "skip  " if nothing_ran else "ok    "
    text = counts.problem or (f"{counts.passed} passed" if counts.passed else "")
    if counts.failed and not counts.problem:
        text = f"{counts.passed} passed, {counts.failed} failed"
    first = f"flaky: {'passed' if counts.ok else 'failed again'} alone" if outcome.first else ""
    text = ", ".join(part for part in (text, counts.skipped, first) if part)
    print(f"[{outcome.place}] " * bool(outcome.place)
          + f"{state} {outcome.seconds:6.1f} s  {outcome.step.name:34} {text}".rstrip())
    if outcome.first and counts.ok:
        _print_output(outcome.first)
    if outcome.output and (verbose or not counts.ok):
        _print_output(outcome)
    sys.stdout.flush()


def _print_output(outcome: Outcome, most: int | None = None) -> None:
    if not callable(outcome.step.command):
        print(f"    $ {' '.join(outcome.step.command)}")
    lines = outcome.output.splitlines()
    print("\n".join(f"    | {line}" for line in lines[-most if most else 0:]))


def print_summary(outcomes: Sequence[Outcome], seconds: float) -> None:
    """Prints the slowest, skipped and flaky steps, what did not run, why, and the closing line."""
    skipped = [outcome.step.name for outcome in outcomes if outcome.counts.skipped]
    flaky = [outcome.step.name for outcome in outcomes if outcome.first and outcome.counts.ok]
    failed = [outcome for outcome in outcomes if outcome.counts.failed]
    slowest = sorted(outcomes, key=lambda outcome: -outcome.seconds)[:5]
    print(f"\n{len(outcomes)} steps in {seconds:.0f} s; the longest: "
          + ", ".join(f"{each.step.name} {each.seconds:.0f} s" for each in slowest))
    if skipped:
        print("skipped in part or altogether: " + ", ".join(skipped))
    if flaky:
        print("flaky: failed by a deadline, then passed alone: " + ", ".join(flaky))
    not_run = collections.Counter(outcome.counts.not_run for outcome in outcomes)
    if failed:
        print("failed steps: " + ", ".join(outcome.step.name for outcome in failed))
    for cause in filter(None, not_run):
        print(f"not run: {not_run[cause]} steps, because {cause} failed:")
        _print_output(next(each for each in failed if each.step.name == cause), _CAUSE_LINES)
    print(f"{sum(outcome.counts.passed for outcome in outcomes)} passed, "
          f"{sum(outcome.counts.failed for outcome in outcomes)} failed")
