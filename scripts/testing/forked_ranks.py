"""Runs Python programs one after the other, each on so many ranks: processes that have PyTorch loaded already, as
loading it takes longer than what most of them do; also its compiler, which optimizers and torch.func load, too. For the
rest they are started as by mpirun.

Usage: forked_ranks.py RANKS|NODES PROGRAM... [-- ARGUMENT...]; NODES are the node of each rank, as in 0,0,1. A program
is a file, or the name of a module. Ends at the first that fails.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import signal
import sys

import torch._dynamo  # noqa: F401, for the programs


def main() -> int:
    places, *words = sys.argv[1:]
    nodes = places.split(",") if "," in places else [""] * int(places)
    at = words.index("--") if "--" in words else len(words)
    for number, program in enumerate(words[:at]):
        job = f"forked-{os.getpid()}-{number}"
        ranks = []
        for rank in range(len(nodes)):
            child = os.fork()
            if child == 0:
                _become(rank, nodes, job)
                _execute(program, words[at + 1:])
                return 0
            ranks.append(child)
        if status := _wait(ranks):
            print(f"{program}: status {status}", file=sys.stderr)
            return 1
    return 0


def _become(rank: int, nodes: list[str], job: str) -> None:
    # Ranks find each other by the name of their job.
    os.environ |= {"PMIX_NAMESPACE": job, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(len(nodes)),
                   "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(len(nodes))}
    if nodes[rank]:
        os.environ["NCCL_HOSTID"] = f"node{nodes[rank]}"


def _execute(program: str, arguments: list[str]) -> None:
    sys.argv = [program, *arguments]
    if not program.endswith(".py"):
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(pathlib.Path(program).parent)
    runpy.run_path(program, run_name="__main__")


def _wait(ranks: list[int]) -> int:
    """The first status that is not 0; the other ranks are ended then."""
    failed = 0
    while ranks:
        child, raw = os.wait()
        ranks.remove(child)
        status = os.waitstatus_to_exitcode(raw)
        if status and not failed:
            failed = status
            for each in ranks:
                os.kill(each, signal.SIGTERM)
    return failed


if __name__ == "__main__":
    sys.exit(main())
