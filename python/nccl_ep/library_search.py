"""Finds and loads libnccl_ep.so and the NCCL that goes with it.

libnccl_ep.so is linked with neither NCCL nor CUDA: it uses the NCCL that the process has. So NCCL
is loaded first, and for the whole process.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import pathlib
from collections.abc import Iterator

_EP_NAMES = ("libnccl_ep.so", "libnccl_ep.so.0")
_NCCL_NAMES = ("libnccl.so.2", "libnccl.so")


def find_library() -> str:
    """The path or name of the library to load: the first that exists of

    NCCL_EP_LIBRARY; lib/libnccl_ep.so beside this file, which a wheel brings; libnccl_ep.so, then
    libnccl.so in NCCL_HOME/lib; what the loader knows under these names.
    """
    if chosen := os.environ.get("NCCL_EP_LIBRARY"):
        return chosen
    beside = pathlib.Path(__file__).resolve().parent / "lib" / "libnccl_ep.so"
    home = _home()
    paths = [beside, *(home / name for name in ("libnccl_ep.so", "libnccl.so") if home)]
    for path in paths:
        if path.exists():
            return str(path)
    for short, names in (("nccl_ep", _EP_NAMES), ("nccl", _NCCL_NAMES)):
        for name in names:
            if _loads(name):
                return name
        if found := ctypes.util.find_library(short):
            return found
    raise RuntimeError(
        "libnccl_ep.so not found: set NCCL_EP_LIBRARY to its path, or NCCL_HOME to a folder with "
        "lib/libnccl_ep.so, or put its folder into LD_LIBRARY_PATH")


def load_nccl(library: str) -> ctypes.CDLL:
    """Loads NCCL for the whole process; `library` is where libnccl_ep.so was found.

    The first that loads of: NCCL_EP_NCCL_LIBRARY; what the process has already, so that
    communicators of other parts of the program can be used; the folder of `library`; NCCL_HOME/lib;
    the copy that PyTorch brings; what the loader finds.
    """
    if chosen := os.environ.get("NCCL_EP_NCCL_LIBRARY"):
        return ctypes.CDLL(chosen, mode=ctypes.RTLD_GLOBAL)
    process = ctypes.CDLL(None)
    if hasattr(process, "ncclCommInitRank"):
        return process
    for candidate in _nccl_candidates(library):
        try:
            found = ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if hasattr(found, "ncclCommInitRank"):
            return found
    raise RuntimeError(
        f"{library} needs NCCL, and no libnccl.so.2 was found beside it, in NCCL_HOME/lib, in "
        "PyTorch or by the loader; set NCCL_EP_NCCL_LIBRARY to its path")


def _nccl_candidates(library: str) -> Iterator[str]:
    folders = []
    if os.sep in library:
        folders.append(pathlib.Path(library).resolve().parent)
        folders.append(pathlib.Path(library).parent)
    if home := _home():
        folders.append(home)
    for folder in folders:
        for name in _NCCL_NAMES:
            if (folder / name).exists():
                yield str(folder / name)
    # By name: a copy that is loaded already, as PyTorch's, answers to it.
    yield "libnccl.so.2"
    if bundled := _nccl_of_wheel():
        yield bundled
    for name in ("nccl.2", "nccl"):
        if found := ctypes.util.find_library(name):
            yield found


def _nccl_of_wheel() -> str:
    """The NCCL of the wheel nvidia-nccl, which PyTorch needs; it need not be imported for that."""
    try:
        import nvidia.nccl  # type: ignore[import-not-found]
    except ImportError:
        return ""
    for folder in nvidia.nccl.__path__:
        path = pathlib.Path(folder) / "lib" / "libnccl.so.2"
        if path.exists():
            return str(path)
    return ""


def _home() -> pathlib.Path | None:
    home = os.environ.get("NCCL_HOME")
    return pathlib.Path(home) / "lib" if home else None


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
