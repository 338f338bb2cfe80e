"""A simulated machine for tests of scripts: a copy of the scripts in a temporary folder, and fake
commands ahead of this machine's own.
"""

import atexit
import functools
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

from testing.step import ROOT

_NOT_ON_EVERY_MACHINE = ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-gcc", "apt-get", "cmake", "mpicc", "mpirun",
                         "nvcc", "nvidia-smi", "qemu-aarch64", "sudo")
NVCC = "echo 'Cuda compilation tools, release 13.0, V13.0.88'"


@functools.cache
def _usual_commands() -> pathlib.Path:
    """A folder of this machine's commands, only those that every machine has."""
    folder = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    for entry in os.environ["PATH"].split(":"):
        for command in pathlib.Path(entry).glob("*"):
            if command.name not in _NOT_ON_EVERY_MACHINE and not (folder / command.name).exists():
                (folder / command.name).symlink_to(command)
    return folder


class Machine:
    """A copy of the scripts, with fake commands ahead of the real ones."""

    def __init__(self, test: unittest.TestCase, name: str = "tree") -> None:
        folder = tempfile.TemporaryDirectory()
        test.addCleanup(folder.cleanup)
        self.test = test
        self.root = pathlib.Path(folder.name) / name
        self.tools = pathlib.Path(folder.name) / "bin"
        self.tools.mkdir()
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        self.environment = {"PATH": f"{self.tools}:{_usual_commands()}", "HOME": os.environ.get("HOME", "/")}

    def write(self, path: str | pathlib.Path, text: str = "") -> pathlib.Path:
        """Writes a file of the tree."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def command(self, path: str | pathlib.Path, text: str) -> None:
        """Replaces a command by a shell script."""
        self.write(self.tools / path, f"#!/bin/bash\n{text}\n").chmod(0o755)

    def tool_kit(self) -> None:
        """Gives the machine a CUDA tool kit."""
        self.command(self.root / "cuda" / "bin" / "nvcc", NVCC)
        self.write("cuda/include/cuda_runtime.h")
        self.environment["CUDA_HOME"] = str(self.root / "cuda")

    def gpus(self, count: int) -> None:
        """Gives the machine an nvidia-smi that lists this number of GPUs."""
        lines = "".join(f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})\\n" for i in range(count))
        self.command("nvidia-smi", f"printf '{lines}'")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in the tree; output and errors are merged."""
        return subprocess.run(words, cwd=self.root, env=self.environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)

    def succeeds(self, *words: str) -> str:
        """What a command says, which must not fail."""
        done = self.run(*words)
        self.test.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def fails(self, *words: str) -> str:
        """What a command says, which must fail."""
        done = self.run(*words)
        self.test.assertNotEqual(done.returncode, 0, done.stdout)
        return done.stdout
