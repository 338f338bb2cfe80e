"""Pythons that have loaded PyTorch and nothing of this package: forks of one, as loading it takes seconds.

As a program: reads lines of JSON, runs what they say in a fork each, and answers with its status.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile


def environment() -> dict[str, str]:
    """That of a job of one rank; torch.distributed is not in use there."""
    launchers = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "MASTER_")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(launchers)},
            "RANK": "0", "WORLD_SIZE": "1"}


class Fresh:
    """The one that is forked; a context."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen([sys.executable, __file__], env=environment(), text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """A Python with these words, "-c" and a code or "-m", a module and its arguments."""
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            print(json.dumps([words, settings, out.name, err.name]), file=self._parent.stdin, flush=True)
            status = int(self._parent.stdout.readline())
            return subprocess.CompletedProcess(words, status, out.read(), err.read())

    def __enter__(self) -> Fresh:
        return self

    def __exit__(self, *error: object) -> None:
        self._parent.communicate(timeout=60)


def main() -> int:
    import torch  # noqa: F401, for the forks

    for line in sys.stdin:
        words, settings, *files = json.loads(line)
        if (child := os.fork()) == 0:
            os.environ |= settings
            for number, file in enumerate(files, 1):
                os.dup2(os.open(file, os.O_WRONLY), number)
            sys.argv = [*words[:1], *words[2:]]
            sys.path[0] = ""
            if words[0] == "-m":
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
            return 0
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
