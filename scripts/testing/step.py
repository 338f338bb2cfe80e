"""What a step of the test run is, and what comes out of it.

A step is one command, or one Python function for what no command prints readably. Everything else
(order, side-by-side running, printing) is in pool.py; how output becomes counts is in counts.py.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A command that has ended: its status, everything it printed, and whether time ran out."""

    status: int
    output: str
    timed_out: bool = False


@dataclasses.dataclass(frozen=True)
class Counts:
    """Checks of one step; `problem` says why a step failed whose own counts do not show it.

    `skipped` is why something was not tested, in the words of the program, or empty.
    """

    passed: int
    failed: int
    problem: str = ""
    skipped: str = ""

    @property
    def ok(self) -> bool:
        return self.failed == 0


@dataclasses.dataclass(frozen=True)
class Places:
    """Where things are: decided once, from the environment that env.sh exports."""

    environment: Mapping[str, str]
    target: pathlib.Path  # cargo's target directory
    programs: pathlib.Path  # the C programs linked with the CPU stand-ins

    @property
    def libraries(self) -> pathlib.Path:
        return self.target / "release"

    @property
    def sanitized(self) -> pathlib.Path:
        return self.target / "c-sanitize" / "host"


@dataclasses.dataclass(frozen=True)
class Step:
    """One line of the report.

    `cores` is how much of the machine the step uses, `needs` names steps that must have passed.
    """

    name: str
    command: tuple[str, ...] | Callable[[], tuple[Counts, str]]
    read: Callable[[Finished], Counts] | None = None
    needs: tuple[str, ...] = ()
    cores: int = 1
    timeout: int = 120
    environment: tuple[tuple[str, str], ...] = ()
