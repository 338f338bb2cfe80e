"""Counts of checks from the output of a command.

Every reader is strict: a crash, a time-out, a missing closing line or a run without any check is a
failure, whatever else was printed. Only a program that skipped everything, by its exit status and
its text, may pass without a check.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from testing.step import Counts, Finished

_CLOSING_LINE = re.compile(r"^(\d+) passed, (\d+) failed\s*$", re.MULTILINE)
_SKIPPED_LINE = re.compile(r"^(\d+ skipped: .*\S)\s*$", re.MULTILINE)
_SKIPPED_STATUS = 77  # exit status of a program that skipped everything (harness.h)
_CARGO_RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", re.MULTILINE)
# ep_bench with --validate, once for each sweep.
BENCH_PASSED = r"Global validation: Dispatch=PASSED, Combine=PASSED"
# ep_bench_2, once for each of the later interface's layouts.
_BENCH_2_LINE = r"^(?:ll|ht)-\w+ +SMs 24 .* pair +[\d.]+ update"
# Not a test, but the function that a test runs in a second process.
_CARGO_CHILD = re.compile(r"^test .* \.\.\. ignored, entry point of child processes$", re.MULTILINE)
# The step gpu/rust runs these.
_CARGO_GPU = re.compile(r"^test .* \.\.\. ignored, needs a GPU$", re.MULTILINE)


def _judge(finished: Finished, passed: int, failed: int, problem: str) -> Counts:
    """Adds a failure if the command ended badly and no failed check explains it."""
    if finished.timed_out:
        problem = "ran out of time"
    elif finished.status != 0 and failed == 0:
        problem = f"exit status {finished.status}"
    if problem and failed == 0:
        failed = 1
    return Counts(passed, failed, problem)


def exit_status(finished: Finished) -> Counts:
    """The command is one check."""
    return _judge(finished, 1 if finished.status == 0 and not finished.timed_out else 0, 0, "")


def no_warning(finished: Finished) -> Counts:
    """The command is one check: it also says no line that begins with `warning`."""
    if re.search(r"^warning\b", finished.output, re.MULTILINE):
        return _judge(finished, 0, 0, "warnings")
    return exit_status(finished)


def build(finished: Finished) -> Counts:
    """A step that prepares others: no checks, but its failure counts."""
    return _judge(finished, 0, 0, "")


def closing_line(finished: Finished) -> Counts:
    """A program that ends with the line `N passed, N failed`; the last such line counts."""
    lines = _CLOSING_LINE.findall(finished.output)
    if not lines:
        return _judge(finished, 0, 0, "no closing line")
    passed, failed = (int(number) for number in lines[-1])
    said = _SKIPPED_LINE.findall(finished.output)
    skipped = said[-1] if said else ""
    if skipped and finished.status == _SKIPPED_STATUS and passed + failed == 0:
        finished = dataclasses.replace(finished, status=0)
    elif passed + failed == 0:
        return _judge(finished, 0, 0, "no check ran")
    return dataclasses.replace(_judge(finished, passed, failed, ""), skipped=skipped)


def cargo_test(finished: Finished) -> Counts:
    """The sum over all test binaries of cargo.

    A test ignored for lack of a GPU counts as skipped. Any other ignored test is a failure, because
    it would go unnoticed.
    """
    results = [tuple(map(int, numbers)) for numbers in _CARGO_RESULT.findall(finished.output)]
    passed, failed, ignored = (sum(column) for column in zip(*results)) if results else (0, 0, 0)
    for_gpus = len(_CARGO_GPU.findall(finished.output))
    ignored -= len(_CARGO_CHILD.findall(finished.output)) + for_gpus
    problem = f"{ignored} ignored" if ignored else ("" if passed + failed else "no test ran")
    skipped = f"{for_gpus} skipped: no GPU" if for_gpus else ""
    return dataclasses.replace(_judge(finished, passed, failed, problem), skipped=skipped)


def says(pattern: str, times: int):
    """A program without counts: one check, that it succeeds and prints `pattern` so often."""
    expression = re.compile(pattern, re.MULTILINE)

    def read(finished: Finished) -> Counts:
        seen = len(expression.findall(finished.output))
        if seen != times:
            return _judge(finished, 0, 0, f"printed '{pattern}' {seen} times instead of {times}")
        return exit_status(finished)

    return read


def of_program(name: str, options: Sequence[str]):
    """A C program: a benchmark prints a line for each sweep, or layout, and all others end with counts."""
    def items(option: str) -> int:
        return options[options.index(option) + 1].count(",") + 1 if option in options else 1

    if name == "ep_bench_2":
        return says(_BENCH_2_LINE, items("--layouts"))
    cast = ", Cast=PASSED" if "--cast" in options else ""
    return says(BENCH_PASSED + cast, items("--sweep")) if name == "ep_bench" else closing_line
