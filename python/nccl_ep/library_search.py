"""Finds and loads libnccl_ep.so and the NCCL that goes with it.

libnccl_ep.so links neither NCCL nor CUDA: it uses the NCCL that the process has loaded. So NCCL is
loaded first, for the whole process.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import pathlib
from collections.abc import Iterator

# Without a version: libnccl_ep.so.0 is a later generation with another interface.
_EP_NAME = "libnccl_ep.so"
STAND_INS = "libncclep_hostsim.so"
_NCCL_NAMES = ("libnccl.so.2", "libnccl.so")
# Functions that only later generations have, and what their Python packages are.
_LATER = {
    "ncclEpInitHandle": "The package nccl.ep (pip install nccl-extensions)",
    "ncclEpTensorGetData": "The nccl_ep package of NCCL 2.30",
}


def find_library() -> str:
    """The path or name of the library to load: the first that exists of

    NCCL_EP_LIBRARY; lib/libnccl_ep.so beside this file, which a wheel brings; libnccl_ep.so in
    NCCL_HOME/lib, then by the loader; libnccl.so, which has the base functions only, likewise.
    """
    if chosen := os.environ.get("NCCL_EP_LIBRARY"):
        return existing(chosen, "NCCL_EP_LIBRARY")
    home = _home()
    beside = pathlib.Path(__file__).resolve().parent / "lib"
    for folder in (beside, home):
        if folder and (folder / _EP_NAME).exists():
            return str(folder / _EP_NAME)
    if _loads(_EP_NAME):
        return _EP_NAME
    if home and (home / "libnccl.so").exists():
        return str(home / "libnccl.so")
    for name in _NCCL_NAMES:
        if _loads(name):
            return name
    if found := ctypes.util.find_library("nccl"):
        return found
    raise RuntimeError(
        "libnccl_ep.so not found: set NCCL_EP_LIBRARY to its path, or NCCL_HOME to a folder with "
        "lib/libnccl_ep.so, or put its folder into LD_LIBRARY_PATH")


def on_the_cpu(library: str) -> str:
    """What to do without a GPU. Wheels and builds have the stand-ins beside `library`."""
    path = pathlib.Path(library).resolve().parent / STAND_INS
    return f"to run on the CPU set NCCL_EP_NCCL_LIBRARY to {path if path.exists() else STAND_INS}"


def only_nccl(path: str) -> str:
    """What is wrong with a library that has no groups."""
    return (f"{path} is no libnccl_ep.so: it has NCCL's functions only; set NCCL_EP_LIBRARY to the path of "
            "libnccl_ep.so")


def require_first_generation(library: ctypes.CDLL, path: str) -> None:
    """Raises RuntimeError for a libnccl_ep of a later generation, whose calls take other arguments.

    Its file and some of its functions have the same names.
    """
    if name := later_generation(library):
        raise RuntimeError(
            f"{file_of(library, name) or path}{_found_by(path)} is NCCL EP of a later "
            f"generation{_version(library)}: it has {name}, and its calls take other arguments "
            f"than this package passes. {_LATER[name]} serves it; for this package set "
            "NCCL_EP_LIBRARY to the path of its own libnccl_ep.so")


def later_generation(library: ctypes.CDLL) -> str:
    """A function that only a libnccl_ep of a later generation has; empty for the first."""
    return next((name for name in _LATER if hasattr(library, name)), "")


def _found_by(path: str) -> str:
    """How the library was found, if not by its own path."""
    if path == os.environ.get("NCCL_EP_LIBRARY"):
        return ", which NCCL_EP_LIBRARY names,"
    if os.sep not in path:
        return f", which the loader has found for {path},"
    home = _home()
    return ", found by NCCL_HOME," if home and path == str(home / _EP_NAME) else ""


def _version(library: ctypes.CDLL) -> str:
    """The version that a later generation tells, if it does."""
    number = ctypes.c_int()
    if not hasattr(library, "ncclEpGetVersion") or library["ncclEpGetVersion"](
            ctypes.byref(number)) != 0:
        return ""
    major, rest = divmod(number.value, 10000)
    return f" ({major}.{rest // 100}.{rest % 100})"


class _DlInfo(ctypes.Structure):
    """What dladdr tells of an address."""

    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p),
                ("address", ctypes.c_void_p)]


def file_of(library: ctypes.CDLL, name: str) -> str:
    """The file that defines this function of a library, without links; empty if that is unknown."""
    info = _DlInfo()
    address = ctypes.cast(library[name], ctypes.c_void_p)
    if not ctypes.CDLL(None)["dladdr"](address, ctypes.byref(info)) or not info.file:
        return ""
    return os.path.realpath(os.fsdecode(info.file))


def other_copies_of_nccl(used: ctypes.CDLL) -> tuple[str, list[str]]:
    """The file of the NCCL in use, and those of other copies in this process."""
    name = "ncclCommCuDevice"  # which the library needs, and few others would define
    mine = file_of(used, name)
    # A library's functions are also those of what it needs.
    others = [path for path, library in loaded_libraries() if path != mine and hasattr(library, name)
              and file_of(library, name) == os.path.realpath(path)]
    return mine, others


def loaded_libraries() -> Iterator[tuple[str, ctypes.CDLL]]:
    """The libraries that this process has loaded, with their files."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        files = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line}
    for path in sorted(files):
        try:
            yield path, ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
        except OSError:
            continue


def existing(path: str, named_by: str) -> str:
    """`path`; an error that names its source if there is no such file.

    NCCL is loaded first, so a wrong path would look like a missing NCCL. The loader searches for a
    name without a folder.
    """
    if os.sep in path and not os.path.exists(path):
        raise RuntimeError(f"{named_by}: there is no file {path}")
    return path


def load_nccl(library: str) -> ctypes.CDLL:
    """Loads NCCL for the whole process; `library` is where libnccl_ep.so was found.

    The first that loads of: NCCL_EP_NCCL_LIBRARY; the NCCL that the process has, so that
    communicators of other parts of the program can be used; the folder of `library`; NCCL_HOME/lib;
    the copy that PyTorch has loaded or brings; what the loader finds.
    """
    if chosen := os.environ.get("NCCL_EP_NCCL_LIBRARY"):
        try:
            return ctypes.CDLL(chosen, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise RuntimeError(f"NCCL_EP_NCCL_LIBRARY: cannot be loaded: {error}") from error
    process = ctypes.CDLL(None)
    if hasattr(process, "ncclCommInitRank"):
        # By its file: other names, such as those of the CPU stand-ins' CUDA, may be another
        # library's in the process as a whole.
        try:
            return ctypes.CDLL(file_of(process, "ncclCommInitRank"), mode=os.RTLD_NOLOAD)
        except OSError:
            return process  # the program itself has it
    for candidate, flags in _nccl_candidates(library):
        try:
            found = ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL | flags)
        except OSError:
            continue
        if hasattr(found, "ncclCommInitRank"):
            return found
    raise RuntimeError(
        f"{library} needs NCCL, and no libnccl.so.2 was found beside it, in NCCL_HOME/lib, in "
        f"PyTorch or by the loader; set NCCL_EP_NCCL_LIBRARY to its path; {on_the_cpu(library)}")


def _nccl_candidates(library: str) -> Iterator[tuple[str, int]]:
    """Candidate paths or names in order, each with its dlopen flags."""
    folders = []
    if os.sep in library:
        folders.append(pathlib.Path(library).resolve().parent)
        folders.append(pathlib.Path(library).parent)
    if home := _home():
        folders.append(home)
    for folder in folders:
        for name in _NCCL_NAMES:
            if (folder / name).exists():
                yield str(folder / name), 0
    # A copy that is already loaded, such as PyTorch's, is found by its name. A system copy is not
    # loaded yet, and PyTorch would load a second one beside it.
    yield "libnccl.so.2", os.RTLD_NOLOAD
    if bundled := _nccl_of_wheel():
        yield bundled, 0
    yield "libnccl.so.2", 0
    for name in ("nccl.2", "nccl"):
        if found := ctypes.util.find_library(name):
            yield found, 0


def _nccl_of_wheel() -> str:
    """The NCCL of the wheel nvidia-nccl, which PyTorch needs; works without importing PyTorch."""
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
