#!/usr/bin/env python3
"""The GPUs of this machine and their NCCL; the only place where scripts look for either.

    gpus.py count   prints how many GPUs programs may use
    gpus.py nccl    prints the folder of libnccl.so.2, or `system` if the loader finds it by itself;
                    status 1 if there is none

Needs Python's standard library and nothing else of this repository.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping

_DRIVER_NODE = pathlib.Path("/dev/nvidiactl")
_LIBRARY = "libnccl.so.2"
# What setup.sh fetches, unless env.sh has decided for another place.
_DEPS = pathlib.Path(__file__).resolve().parents[1] / ".deps"
SYSTEM = "system"


def names() -> list[str]:
    """The GPUs of this machine, as nvidia-smi prints them."""
    try:
        done = subprocess.run(("nvidia-smi", "-L"), stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True, check=False)
    except OSError:
        return []
    return re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", done.stdout, re.MULTILINE)


def visible(listed: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that programs may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or listed == 0:
        return tuple(str(index) for index in range(listed))
    usable = []
    for entry in map(str.strip, chosen.split(",")):
        # CUDA stops at the first entry that names no GPU.
        if not entry or entry.startswith("-") or (entry.isdigit() and int(entry) >= listed):
            break
        usable.append(entry)
    return tuple(usable)


def count(environment: Mapping[str, str]) -> int:
    """The number of GPUs that programs may use.

    A driver whose GPUs cannot be listed counts as one, so that later steps show the real error
    instead of taking this for a machine without a GPU.
    """
    listed = len(names())
    if listed == 0:
        return 1 if _DRIVER_NODE.exists() else 0
    return len(visible(listed, environment))


def find_nccl(environment: Mapping[str, str]) -> str:
    """The folder of libnccl.so.2, SYSTEM if the loader finds it by itself, or nothing.

    Order: the loader, NCCL_HOME/lib, the wheel that PyTorch and others install, setup.sh's copy.
    """
    try:
        ctypes.CDLL(_LIBRARY)
        return SYSTEM
    except OSError:
        pass
    home = environment.get("NCCL_HOME")
    folders = [pathlib.Path(home) / "lib"] if home else []
    folders += [pathlib.Path(entry) / "nvidia" / "nccl" / "lib" for entry in sys.path if entry]
    # For a machine with GPUs that has none.
    deps = pathlib.Path(environment.get("NCCL_EP_DEPS") or _DEPS)
    for folder in (*folders, deps / "nccl-library/nvidia/nccl/lib"):
        if (folder / _LIBRARY).exists():
            return str(folder)
    return ""


def library_path(environment: Mapping[str, str], nccl: str, *first: str) -> str:
    """LD_LIBRARY_PATH: the folders `first`, the caller's, and `nccl` unless the loader has one."""
    folders = (*first, environment.get("LD_LIBRARY_PATH", ""), "" if nccl == SYSTEM else nccl)
    return ":".join(filter(None, folders))


def main() -> int:
    asked = sys.argv[1:]
    if asked == ["count"]:
        print(count(os.environ))
        return 0
    if asked == ["nccl"]:
        nccl = find_nccl(os.environ)
        print(nccl)
        return 0 if nccl else 1
    print("usage: gpus.py count | nccl", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
