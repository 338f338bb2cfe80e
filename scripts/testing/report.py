"""The runners' report: one line per step, the output of failed ones, and the sums.

Also the choice of steps by --only, which both runners share.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from testing.pool import Outcome
from testing.step import Step


def select(steps: Sequence[Step], words: Sequence[str]) -> list[Step]:
    """The steps that match a word, and the steps that these need, in the given order."""
    if not words:
        return list(steps)
    # A match starts a word, so that "ll" does not match "install".
    pattern = re.compile("|".join(rf"(?<![a-z0-9]){re.escape(word)}" for word in words))
    wanted = {step.name for step in steps if pattern.search(step.name)}
    for step in reversed(steps):
        if step.name in wanted:
            wanted.update(step.needs)
    return [step for step in steps if step.name in wanted]


def print_outcome(outcome: Outcome, verbose: bool) -> None:
    """Prints one line, and the output of a failed step."""
    counts = outcome.counts
    nothing_ran = counts.skipped and counts.passed + counts.failed == 0
    state = "FAILED" if not counts.ok else "skip  " if nothing_ran else "ok    "
    text = counts.problem or (f"{counts.passed} passed" if counts.passed else "")
    if counts.failed and not counts.problem:
        text = f"{counts.passed} passed, {counts.failed} failed"
    if counts.skipped:
        text = ", ".join(part for part in (text, counts.skipped) if part)
    print(f"{state} {outcome.seconds:6.1f} s  {outcome.step.name:34} {text}".rstrip())
    if outcome.output and (verbose or not counts.ok):
        if not callable(outcome.step.command):
            print(f"    $ {' '.join(outcome.step.command)}")
        print("\n".join(f"    | {line}" for line in outcome.output.splitlines()))
    sys.stdout.flush()


def print_summary(outcomes: Sequence[Outcome], seconds: float) -> None:
    """Prints the slowest, failed and skipped steps, then the closing line."""
    broken = [outcome.step.name for outcome in outcomes if not outcome.counts.ok]
    skipped = [outcome.step.name for outcome in outcomes if outcome.counts.skipped]
    slowest = sorted(outcomes, key=lambda outcome: -outcome.seconds)[:5]
    print(f"\n{len(outcomes)} steps in {seconds:.0f} s; the longest: "
          + ", ".join(f"{each.step.name} {each.seconds:.0f} s" for each in slowest))
    if skipped:
        print("skipped in part or altogether: " + ", ".join(skipped))
    if broken:
        print("failed steps: " + ", ".join(broken))
    print(f"{sum(outcome.counts.passed for outcome in outcomes)} passed, "
          f"{sum(outcome.counts.failed for outcome in outcomes)} failed")
