"""Runs steps in order, in parallel where their weights allow, and prints each as it ends.

A step starts when the steps that it needs have passed and enough cores are free. If one of those
failed, it does not run and counts as a failure, so that a broken build cannot shrink the total.
Steps without a core of their own mostly sleep: one of them at a time runs beside the others.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from testing import command
from testing.step import Counts, Step


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A finished step."""

    step: Step
    counts: Counts
    seconds: float
    output: str


def run_steps(steps: Sequence[Step], environment: Mapping[str, str], cores: int,
              report: Callable[[Outcome], None]) -> list[Outcome]:
    """Runs all steps; returns their outcomes in the order in which they ended."""
    waiting = list(steps)
    passed: dict[str, bool] = {}
    outcomes: list[Outcome] = []
    running: dict[concurrent.futures.Future, Step] = {}

    def finish(outcome: Outcome) -> None:
        passed[outcome.step.name] = outcome.counts.ok
        outcomes.append(outcome)
        report(outcome)

    with concurrent.futures.ThreadPoolExecutor(max_workers=cores + 1) as executor:
        try:
            while waiting or running:
                while step := _hopeless(waiting, passed):
                    waiting.remove(step)
                    finish(_skipped(step, passed))
                for step in _startable(waiting, passed, list(running.values()), cores):
                    waiting.remove(step)
                    running[executor.submit(_run, step, environment)] = step
                if not running:
                    if not waiting:
                        break
                    raise ValueError(f"{waiting[0].name} needs a step that is not in the list")
                ended, _ = concurrent.futures.wait(
                    running, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in ended:
                    del running[future]
                    finish(future.result())
        except BaseException:
            command.stop_all()
            raise
    return outcomes


def _weight(step: Step, cores: int) -> int:
    return min(step.cores, cores)


def _hopeless(waiting: Sequence[Step], passed: Mapping[str, bool]) -> Step | None:
    """A step with a failed need; the caller marks it as failed before the next call."""
    for step in waiting:
        if any(passed.get(need) is False for need in step.needs):
            return step
    return None


def _startable(waiting: Sequence[Step], passed: Mapping[str, bool], running: Sequence[Step],
               cores: int) -> list[Step]:
    """The steps to start now, in order: later light steps do not overtake a heavy one."""
    free = cores - sum(_weight(step, cores) for step in running)
    may_sleep = all(step.cores > 0 for step in running)
    chosen = []
    for step in waiting:
        if not all(passed.get(need) for need in step.needs):
            continue
        if step.cores == 0:
            starts, may_sleep = may_sleep, False
        else:
            starts = _weight(step, cores) <= free
            free = free - _weight(step, cores) if starts else 0
        if starts:
            chosen.append(step)
    return chosen


def _skipped(step: Step, passed: Mapping[str, bool]) -> Outcome:
    need = next(need for need in step.needs if passed.get(need) is False)
    return Outcome(step, Counts(0, 1, f"not run, because {need} failed"), 0.0, "")


def _run(step: Step, environment: Mapping[str, str]) -> Outcome:
    start = time.monotonic()
    if callable(step.command):
        try:
            counts, output = step.command()
        except Exception as error:  # a check that raises has failed
            counts, output = Counts(0, 1, f"{type(error).__name__}: {error}"), ""
    else:
        finished = command.run(step.command, {**environment, **dict(step.environment)},
                               step.timeout)
        counts, output = step.read(finished), finished.output
    return Outcome(step, counts, time.monotonic() - start, output)
