"""What a machine with GPUs has for the tests: GPUs, Open MPI, NCCL, and the built programs.

Nothing here is imported from CUDA or NCCL: a machine that only runs prebuilt programs has neither
their headers nor their compilers.
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


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where things are on this machine."""

    environment: Mapping[str, str]
    programs: pathlib.Path  # with the folders gpu/ and onegpu/
    devices: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them
    names: tuple[str, ...]  # as nvidia-smi prints them
    nccl: str  # where libnccl.so.2 was found; empty if it was not
    builds: bool  # whether programs are built here, not brought

    @property
    def has_mpi(self) -> bool:
        """Whether there is a launcher."""
        return shutil.which("mpirun", path=self.environment.get("PATH")) is not None

    @property
    def has_cargo(self) -> bool:
        """Whether the Rust tests can be built."""
        return shutil.which("cargo", path=self.environment.get("PATH")) is not None

    @property
    def has_sanitizer(self) -> bool:
        """Whether kernels can be watched; the tool comes with the CUDA toolkit."""
        return shutil.which("compute-sanitizer", path=self.environment.get("PATH")) is not None


def find(environment: Mapping[str, str], programs: pathlib.Path, builds: bool) -> Machine:
    """Looks at this machine; `environment` is the one that the programs will get."""
    names = tuple(gpus.names())
    nccl = gpus.find_nccl(environment)
    path = {"LD_LIBRARY_PATH": gpus.library_path(environment, nccl, str(programs / "lib"))}
    return Machine({**environment, **path}, programs, gpus.visible(len(names), environment), names,
                   nccl, builds)


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What the program `capabilities` printed: names and values."""

    finished: Finished
    values: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether the library opened a group on a GPU."""
        return self.finished.status == 0 and self.values.get("backend") == "cuda"

    @property
    def has_high_throughput(self) -> bool:
        """Anything but a clear "no" counts as yes, so that doubt leads to a failing test."""
        return self.values.get("high-throughput") != "no"


def ask(machine: Machine) -> Capabilities:
    """Runs one rank over c_tests/fake_nccl, which needs no NCCL and no launcher."""
    program = machine.programs / "onegpu" / "capabilities"
    finished = command.run((str(program),), machine.environment, 120)
    lines = re.findall(r"^([a-z-]+) (\S+)$", finished.output, re.MULTILINE)
    return Capabilities(finished, dict(lines))
