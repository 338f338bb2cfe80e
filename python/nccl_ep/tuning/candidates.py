"""The candidates, shapes of a kernel's grid, and the file that tells the library to use one."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

from nccl_ep.choices import OperationName
from nccl_ep.modes import Algorithm

FORMAT, VERSION = "nccl_ep tuning", 1
VARIABLE = "NCCL_EP_TUNING_FILE"
OPERATIONS: dict[Algorithm, tuple[OperationName, OperationName]] = {
    "ll": ("ll_dispatch", "ll_combine"), "ht": ("ht_dispatch", "ht_combine")}

_BLOCKS = (8, 16, 24, 32, 64)
# High throughput: a block either sends or receives.
_SEND_EIGHTHS = {"ll": (8, 2, 6), "ht": (3, 4, 5)}
# A kernel that has fewer at most reduces larger numbers to that.
_THREADS = {"ll": (256, 512, 1024), "ht": (384, 768)}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """`send_blocks` of `blocks` send; with both equal every block does everything."""

    blocks: int
    threads: int
    send_blocks: int


def candidates(algorithm: str, multiprocessors: int, num_sms: int) -> list[Candidate]:
    """Grids of up to `num_sms` blocks (0: all multiprocessors), divided three ways."""
    most = min(num_sms or multiprocessors, multiprocessors)
    found: dict[Candidate, None] = {}
    for blocks in sorted({min(blocks, most) for blocks in _BLOCKS} | {most}):
        shares = [blocks * eighths // 8 for eighths in _SEND_EIGHTHS[algorithm]]
        for threads in _THREADS[algorithm]:
            for senders in shares:
                found[Candidate(blocks, threads, max(senders, 1))] = None
    return list(found)


def document(gpu: str, ranks: int, entries: list[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    """The contents of a tuning file."""
    return {"format": FORMAT, "version": VERSION, "gpu": gpu, "ranks": ranks, **facts,
            "entries": entries}


def write(path: pathlib.Path, contents: dict[str, Any]) -> None:
    """Replaces the file atomically: a process that starts meanwhile reads the old or the new one.
    """
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        json.dump(contents, file, indent=1)
        file.write("\n")
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def check_writable(path: pathlib.Path) -> None:
    """Raises OSError if `write` could not put a file there."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name):
        pass


@contextlib.contextmanager
def in_force(contents: dict[str, Any]) -> Iterator[pathlib.Path]:
    """Groups created within the context use a file with these contents, which the context has."""
    before = os.environ.pop(VARIABLE, None)
    try:
        with tempfile.TemporaryDirectory(prefix="nccl_ep-tune-") as folder:
            path = pathlib.Path(folder) / "candidate.json"
            write(path, contents)
            os.environ[VARIABLE] = str(path)
            yield path
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before
