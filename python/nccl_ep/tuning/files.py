"""Tuning files: written, merged, in force for a while."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

FORMAT, VERSION = "nccl_ep tuning", 1
VARIABLE = "NCCL_EP_TUNING_FILE"
# What an entry may depend on beside its operation and number of tokens.
CONDITIONS = ("row_bytes", "layout", "memory")


def document(gpu: str, ranks: int, found: list[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    """The contents of a tuning file. What has conditions or a variant is apart, so that versions of the library that
    know neither pass over it."""
    apart = [entry for entry in found if {"row_bytes", "variant"} & entry.keys()]
    choices = {"choices": apart} if apart else {}
    return {"format": FORMAT, "version": VERSION, "gpu": gpu, "ranks": ranks, **facts,
            "entries": [entry for entry in found if entry not in apart], **choices}


def measured(contents: dict[str, Any]) -> list[dict[str, Any]]:
    """All entries of a file that is not merged."""
    return [*contents["entries"], *contents.get("choices", [])]


def write(path: str | os.PathLike[str], contents: dict[str, Any]) -> None:
    """Replaces the file atomically: a process that starts meanwhile reads the old or the new one."""
    beside = pathlib.Path(f"{os.fspath(path)}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(contents, indent=1) + "\n")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)  # as on a disk that is full


def check_writable(path: pathlib.Path) -> None:
    """Raises OSError if `write` could not put a file there."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name):
        pass


@contextlib.contextmanager
def in_force(contents: dict[str, Any] | None) -> Iterator[None]:
    """Groups created within the context use a file with these contents, or none."""
    before = os.environ.pop(VARIABLE, None)
    try:
        with tempfile.TemporaryDirectory(prefix="nccl_ep-tune-") as folder:
            if contents is not None:
                path = pathlib.Path(folder) / "tuning.json"
                write(path, contents)
                os.environ[VARIABLE] = str(path)
            yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The parts of a file: itself, or what was merged."""
    contents = json.loads(pathlib.Path(path).read_text())
    known = {"format": FORMAT, "version": VERSION}
    if not isinstance(contents, dict) or not known.items() <= contents.items():
        raise ValueError(f"{os.fspath(path)}: is no tuning file of version {VERSION}")
    parts: list[dict[str, Any]] = contents.get("files", [contents])
    return parts


def merge(target: str | os.PathLike[str],
          paths: Iterable[str | os.PathLike[str]]) -> dict[str, Any]:
    """Writes what the files say to one, and returns it. Of two entries for one GPU, number of ranks,
    operation, number of tokens and kind of rows the later file's counts. The library takes what fits a group."""
    parts: dict[tuple[str, int], dict[str, Any]] = {}
    for path in paths:
        for part in read(path):
            before = parts.get((part["gpu"], part["ranks"]))
            entries = {tuple(each.get(name) for name in ("operation", "tokens", *CONDITIONS)): each
                       for each in [*(measured(before) if before else ()), *measured(part)]}
            facts = {name: fact for name, fact in (before or part).items() if name not in ("entries", "choices")}
            del facts["format"], facts["version"]
            parts[part["gpu"], part["ranks"]] = document(
                facts.pop("gpu"), facts.pop("ranks"), list(entries.values()), **facts)
    if not parts:
        raise ValueError("paths: must not be empty")
    merged = {"format": FORMAT, "version": VERSION, "files": list(parts.values())}
    write(target, merged)
    return merged
