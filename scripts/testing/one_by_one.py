"""Runs Python programs one after the other, each in a process of its own that has PyTorch loaded already.

Usage, as a rank: one_by_one.py PROGRAM...; to load PyTorch takes longer than what most of the programs do. Ends
at the first that fails.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import sys

import torch  # noqa: F401, for the programs


def main() -> int:
    for number, program in enumerate(sys.argv[1:]):
        child = os.fork()
        if child == 0:
            # Ranks find each other by the name of their job.
            os.environ["PMIX_NAMESPACE"] = f"{os.environ.get('PMIX_NAMESPACE', '')}-{number}"
            sys.argv = [program]
            sys.path[0] = str(pathlib.Path(program).parent)
            runpy.run_path(program, run_name="__main__")
            return 0
        if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            print(f"{program}: status {status}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
