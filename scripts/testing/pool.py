"""Runs steps in order, in parallel where their weights allow, and prints each as it ends.

A step starts when the steps that it needs have passed and enough cores are free. If one of those
failed, it does not run, and so the run does not pass. Steps without a core of their own mostly sleep:
one of them at a time runs beside the others. While cores idle all the same, because ranks wait for
each other, light steps may start beyond that. What failed by a deadline, as anything may on a busy
machine, is repeated once, alone and with longer ones; if it passes then, it is called flaky.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence

from testing import command
from testing.step import Counts, Step


# What programs and the library say when something took too long.
_LATE = re.compile(r"deadline|in time|waited \d+ ms|hung|a pause did harm", re.IGNORECASE)
# How many times as long the deadlines of a repeated step are.
_PATIENCE = {"EP_TEST_PATIENCE": "4"}
_WATCHDOG_SECONDS = 120  # that of the C programs
# How long the use of the cores is watched, and how many of them idle if there is room for one more.
_SAMPLE_SECONDS = 0.5
_ROOM = 0.3


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A finished step; `first` is how it failed before it passed alone."""

    step: Step
    counts: Counts
    seconds: float
    output: str
    timed_out: bool = False
    place: str = ""  # among all, such as 17/442
    first: Outcome | None = None


def run_steps(steps: Sequence[Step], environment: Mapping[str, str], cores: int,
              report: Callable[[Outcome], None], fill: bool = False) -> list[Outcome]:
    """Runs all steps; returns their outcomes in the order in which they ended.

    With `fill`, light steps also start beyond `cores` while the machine's cores idle.
    """
    waiting = list(steps)
    passed: dict[str, bool] = {}
    outcomes: list[Outcome] = []
    late: list[Outcome] = []
    running: dict[concurrent.futures.Future, Step] = {}
    needed = {need for step in steps for need in step.needs}
    room = _Room()

    def finish(outcome: Outcome) -> None:
        if outcome.step.name not in needed and not outcome.first and _is_late(outcome):
            late.append(outcome)
            return
        passed[outcome.step.name] = outcome.counts.ok
        place = f"{len(outcomes) + 1}/{len(steps)}"
        outcomes.append(dataclasses.replace(outcome, place=place))
        report(outcomes[-1])

    with concurrent.futures.ThreadPoolExecutor(max_workers=2 * cores + 1) as executor:
        try:
            while waiting or running:
                while step := _hopeless(waiting, passed):
                    waiting.remove(step)
                    finish(_not_run(step, outcomes))
                for step in _startable(waiting, passed, list(running.values()), cores, fill and room.found()):
                    waiting.remove(step)
                    running[executor.submit(_run, step, environment)] = step
                if not running:
                    if not waiting:
                        break
                    raise ValueError(f"{waiting[0].name} needs a step that is not in the list")
                ended, _ = concurrent.futures.wait(running, _SAMPLE_SECONDS, concurrent.futures.FIRST_COMPLETED)
                for future in ended:
                    del running[future]
                    finish(future.result())
            for first in late:
                again = executor.submit(_run, first.step, {**environment, **_PATIENCE})
                finish(dataclasses.replace(again.result(), first=first))
        except BaseException:
            command.stop_all()
            raise
    return outcomes


def _weight(step: Step, cores: int) -> int:
    return min(step.cores, cores)


def _hopeless(waiting: Sequence[Step], passed: Mapping[str, bool]) -> Step | None:
    """A step with a failed need; the caller notes that it does not run before the next call."""
    for step in waiting:
        if any(passed.get(need) is False for need in step.needs):
            return step
    return None


class _Room:
    """Finds out whether the running steps leave a core to another."""

    def __init__(self) -> None:
        self._since, self._idle = time.monotonic(), command.idle_seconds()

    def found(self) -> bool:
        """Asks for the time since it last said something; not if that is short."""
        now, idle = time.monotonic(), command.idle_seconds()
        seconds, idled = now - self._since, idle - self._idle
        if seconds < _SAMPLE_SECONDS:
            return False
        self._since, self._idle = now, idle
        return idled > _ROOM * seconds


def _startable(waiting: Sequence[Step], passed: Mapping[str, bool], running: Sequence[Step],
               cores: int, has_room: bool) -> list[Step]:
    """The steps to start now, in order: later light steps do not overtake a heavy one."""
    free = cores - sum(_weight(step, cores) for step in running)
    if has_room and len(running) <= 2 * cores:
        free = max(free, 1)
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


def _not_run(step: Step, outcomes: Sequence[Outcome]) -> Outcome:
    failed = next(outcome for outcome in outcomes if outcome.step.name in step.needs and not outcome.counts.ok)
    return Outcome(step, Counts(0, 0, not_run=failed.counts.not_run or failed.step.name), 0.0, "")


def _is_late(outcome: Outcome) -> bool:
    said = f"{outcome.counts.problem}\n{outcome.output}"
    return outcome.counts.failed > 0 and (outcome.timed_out or outcome.step.short_deadlines or bool(_LATE.search(said)))


def _run(step: Step, environment: Mapping[str, str]) -> Outcome:
    start, timed_out = time.monotonic(), False
    if callable(step.command):
        try:
            counts, output = step.command()
        except Exception as error:  # a check that raises has failed
            counts, output = Counts(0, 1, f"{type(error).__name__}: {error}"), ""
    else:
        slowness = command.slowness()
        watchdog = {"EP_TEST_DEADLINE": str(round(_WATCHDOG_SECONDS * slowness))}
        finished = command.run(step.command, {**watchdog, **environment, **dict(step.environment)},
                               step.timeout and step.timeout * slowness)
        counts, output, timed_out = step.read(finished), finished.output, finished.timed_out
    return Outcome(step, counts, time.monotonic() - start, output, timed_out)
