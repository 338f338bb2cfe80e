"""Steps of the test run and their results.

A step is one command, or one Python function where no command prints readable output. Order,
parallel running and printing are in pool.py; counts.py turns output into counts.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping

ROOT = pathlib.Path(__file__).resolve().parents[2]
# For cargo where no kernel runs: build/lib compiles them, for all architectures, a minute's work.
WITHOUT_KERNELS = (("NVCC", str(ROOT / "scripts" / "testing" / "nvcc_stub.sh")),)
# What packages and programs need: the libraries, and what setup.sh installs for programs, beside the former's build.
SETUP = "setup/programs"
BUILT = ("build/lib", SETUP)
# Stand-ins refuse to hide a GPU unless they are asked for.
ON_STAND_INS = (("NCCLEP_HOSTSIM_WITH_GPU", "1"),)
# Grids that the library would not choose, for 3 ranks of 6 multiprocessors or more.
ODD_GRIDS = (("NCCL_EP_TUNING_FILE", str(ROOT / "c_tests" / "simt" / "odd_grids.json")),)


def fetched(environment: Mapping[str, str]) -> pathlib.Path:
    """Where setup.sh puts what it fetches, as env.sh has decided."""
    return pathlib.Path(environment["NCCL_EP_DEPS"])


@dataclasses.dataclass(frozen=True)
class Finished:
    """An ended command: its exit status, all its output, and whether it timed out."""

    status: int
    output: str
    timed_out: bool = False


@dataclasses.dataclass(frozen=True)
class Counts:
    """Checks of one step; `problem` says why it failed if its counts do not show it.

    `skipped` is the program's reason for not testing something, or empty; `not_run` names the step
    whose failure kept this one from running.
    """

    passed: int
    failed: int
    problem: str = ""
    skipped: str = ""
    not_run: str = ""

    @property
    def ok(self) -> bool:
        return self.failed == 0 and not self.not_run


@dataclasses.dataclass(frozen=True)
class Places:
    """Locations, decided once from the environment that env.sh exports."""

    environment: Mapping[str, str]
    target: pathlib.Path  # cargo's target directory
    programs: pathlib.Path  # the C programs linked with the CPU stand-ins

    @property
    def deps(self) -> pathlib.Path:
        """What setup.sh has fetched."""
        return fetched(self.environment)

    @property
    def libraries(self) -> pathlib.Path:
        return pathlib.Path(self.environment["NCCL_EP_RELEASE"])

    @property
    def sanitized(self) -> pathlib.Path:
        return self.target / "c-sanitize" / "host"


@dataclasses.dataclass(frozen=True)
class Step:
    """One step, which is one line of the report.

    `cores` is the share of the machine that it uses, 0 for one that mostly sleeps; `needs` names
    steps that must pass first. `timeout` is in seconds of a machine that does nothing else; None for
    what ends by itself, however long it takes. With `short_deadlines` whatever fails may be too late,
    and not say so.
    """

    name: str
    command: tuple[str, ...] | Callable[[], tuple[Counts, str]]
    read: Callable[[Finished], Counts] | None = None
    needs: tuple[str, ...] = ()
    cores: int = 1
    timeout: int | None = 120
    environment: tuple[tuple[str, str], ...] = ()
    short_deadlines: bool = False

    def skipped(self, reason: str) -> Step:
        """The same, which says why it does nothing."""
        return dataclasses.replace(self, command=lambda: (Counts(0, 0, skipped=reason), ""), needs=())
