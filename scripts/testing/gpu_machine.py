"""What a machine with GPUs has for the tests: GPUs, Open MPI, NCCL, and the built programs.

Nothing here is imported from CUDA or NCCL: a machine that only runs prebuilt programs has neither
their headers nor their compilers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

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

    @property
    def has_mpi(self) -> bool:
        """Whether there is a launcher."""
        return shutil.which("mpirun", path=self.environment.get("PATH")) is not None

    @property
    def has_sanitizer(self) -> bool:
        """Whether kernels can be watched; the tool comes with the CUDA toolkit."""
        return shutil.which("compute-sanitizer", path=self.environment.get("PATH")) is not None


def find(environment: Mapping[str, str], programs: pathlib.Path) -> Machine:
    """Looks at this machine; `environment` is the one that the programs will get."""
    names = tuple(_gpu_names())
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    devices = tuple(chosen.split(",")) if chosen else tuple(str(i) for i in range(len(names)))
    nccl = _find_nccl(environment)
    folders = [str(programs / "lib"), nccl if os.path.isdir(nccl) else "",
               environment.get("LD_LIBRARY_PATH", "")]
    path = {"LD_LIBRARY_PATH": ":".join(folder for folder in folders if folder)}
    return Machine({**environment, **path}, programs, devices, names, nccl)


def _gpu_names() -> list[str]:
    try:
        done = subprocess.run(("nvidia-smi", "-L"), stdout=subprocess.PIPE, text=True, check=False)
    except OSError:
        return []
    return re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", done.stdout, re.MULTILINE)


def _find_nccl(environment: Mapping[str, str]) -> str:
    """The folder of libnccl.so.2, "system" if the loader finds it by itself, or nothing."""
    try:
        ctypes.CDLL("libnccl.so.2")
        return "system"
    except OSError:
        pass
    homes = [pathlib.Path(environment["NCCL_HOME"])] if environment.get("NCCL_HOME") else []
    # PyTorch and others bring it as a wheel.
    homes += [pathlib.Path(entry) / "nvidia" / "nccl" for entry in sys.path if entry]
    for home in homes:
        if (home / "lib" / "libnccl.so.2").exists():
            return str(home / "lib")
    return ""


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
    """Runs one rank over the bootstrap library, which needs no NCCL and no launcher."""
    program = machine.programs / "onegpu" / "capabilities"
    finished = command.run((str(program),), machine.environment, 120)
    lines = re.findall(r"^([a-z-]+) (\S+)$", finished.output, re.MULTILINE)
    return Capabilities(finished, dict(lines))
