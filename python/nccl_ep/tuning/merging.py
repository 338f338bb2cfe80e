"""`python -m nccl_ep.tuning merge OUT FILE...`: one tuning file of several, for GPUs and ranks."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from nccl_ep.tuning.candidates import FORMAT, VERSION, write


def merge(target: str | os.PathLike[str],
          paths: Iterable[str | os.PathLike[str]]) -> dict[str, Any]:
    """Writes what the files say to one, and returns it. Of two entries for one GPU, number of ranks,
    operation and number of tokens the later file's counts. The library takes what fits a group."""
    parts: dict[tuple[str, int], dict[str, Any]] = {}
    for path in paths:
        for part in _parts(path):
            known = parts.setdefault((part["gpu"], part["ranks"]), {**part, "entries": []})
            entries = {(each["operation"], each["tokens"]): each
                       for each in (*known["entries"], *part["entries"])}
            known["entries"] = list(entries.values())
    if not parts:
        raise ValueError("paths: must not be empty")
    merged = {"format": FORMAT, "version": VERSION, "files": list(parts.values())}
    write(pathlib.Path(target), merged)
    return merged


def _parts(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    contents = json.loads(pathlib.Path(path).read_text())
    if contents.get("format") != FORMAT or contents.get("version") != VERSION:
        raise ValueError(f"{os.fspath(path)}: is no tuning file of version {VERSION}")
    parts: list[dict[str, Any]] = contents.get("files", [contents])
    return parts


def main(words: list[str]) -> None:
    """The command, behind the word merge."""
    parser = argparse.ArgumentParser(prog="python -m nccl_ep.tuning merge",
                                     description=merge.__doc__)
    parser.add_argument("target", help="what to write")
    parser.add_argument("files", nargs="+", help="what nccl_ep.tuning has written")
    arguments = parser.parse_args(words)
    merged = merge(arguments.target, arguments.files)
    for part in merged["files"]:
        print(f"{part['gpu']}, {part['ranks']} ranks: {len(part['entries'])} entries")

