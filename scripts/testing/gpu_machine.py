"""What a machine with GPUs offers the tests: GPUs, Open MPI, NCCL, and the built programs.

Needs no headers or compilers of CUDA and NCCL, because a machine that only runs prebuilt programs
has none.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil
from collections.abc import Mapping

import gpus
from testing import command
from testing.step import Finished


# Ranks wait by polling, so two pinned to one core would starve each other.
MPIRUN = ("mpirun", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Locations and devices of this machine."""

    environment: Mapping[str, str]
    programs: pathlib.Path  # with the folders gpu/ and onegpu/
    devices: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them
    names: tuple[str, ...]  # as nvidia-smi prints them
    nccl: str  # folder of libnccl.so.2; empty if not found
    builds: bool  # whether programs are built here

    @property
    def has_mpi(self) -> bool:
        """Whether mpirun exists."""
        return shutil.which("mpirun", path=self.environment.get("PATH")) is not None

    @property
    def has_cargo(self) -> bool:
        """Whether the Rust tests can be built."""
        return shutil.which("cargo", path=self.environment.get("PATH")) is not None

    @property
    def has_sanitizer(self) -> bool:
        """Whether compute-sanitizer exists; it comes with the CUDA toolkit."""
        return shutil.which("compute-sanitizer", path=self.environment.get("PATH")) is not None


def find(environment: Mapping[str, str], programs: pathlib.Path, builds: bool) -> Machine:
    """Inspects this machine; `environment` is that of the programs."""
    names = tuple(gpus.names())
    nccl = gpus.find_nccl(environment)
    path = {"LD_LIBRARY_PATH": gpus.library_path(environment, nccl, str(programs / "lib"))}
    return Machine({**environment, **path}, programs, gpus.visible(len(names), environment), names, nccl, builds)


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """Names and values that the program `capabilities` printed."""

    finished: Finished
    values: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether the library opened a group on a GPU."""
        return self.finished.status == 0 and self.values.get("backend") == "cuda"

    @property
    def has_high_throughput(self) -> bool:
        """Anything but a clear "no" counts as yes, so that doubt ends in a failing test."""
        return self.values.get("high-throughput") != "no"


def ask(machine: Machine) -> Capabilities:
    """Runs one rank over c_tests/fake_nccl, which needs no NCCL and no launcher."""
    program = machine.programs / "onegpu" / "capabilities"
    finished = command.run((str(program),), machine.environment, 120)
    lines = re.findall(r"^([a-z-]+) (\S+)$", finished.output, re.MULTILINE)
    return Capabilities(finished, dict(lines))
