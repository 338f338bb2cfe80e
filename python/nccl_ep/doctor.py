"""What a process finds: versions, libraries and where they are, GPUs, environment; and what is wrong.

Each line is one fact, `ok` or `--`; a line that begins with `!!` wants something done.
"""

from __future__ import annotations

import ctypes
import difflib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator

import nccl_ep
from nccl_ep.library_search import (
    find_library,
    later_generation,
    loaded_libraries,
    on_the_cpu,
    only_nccl,
    other_copies_of_nccl,
)
from nccl_ep.nccl_wrapper import NCCLLibrary

# Of docs/env.md; a test compares.
VARIABLES = ("NCCL_EP_TIMEOUT_MS", "NCCL_EP_NCCL_LIBRARY", "NCCL_EP_LL_COMBINE", "NCCL_EP_NODE_SUMS",
             "NCCL_EP_TUNING_FILE", "NCCL_EP_HT_CHUNK_BYTES", "NCCL_EP_CHECK", "NCCL_EP_PROGRAMMATIC",
             "NCCL_EP_LIBRARY", "NCCL_EP_COMM_SMS", "NCCL_EP_DISPATCH_SMS", "NCCL_EP_COMBINE_SMS",
             "NCCL_EP_HT_EM_LOCAL_DUP", "NCCL_EP_HT_EM_NVLINK_DUP")
# Of builds and tests, and beginnings of those that only NVIDIA's library reads; a test compares both with src/env.
BUILD_VARIABLES = ("NCCL_EP_CUDA", "NCCL_EP_ARCHS", "NCCL_EP_NVCC", "NCCL_EP_DEPS", "NCCL_EP_TARGET",
                   "NCCL_EP_RELEASE", "NCCL_EP_ROOT", "NCCL_EP_LIBRARIES", "NCCL_EP_ENGINES",
                   "NCCL_EP_UPDATE_HEADER")
READ_BY_NVIDIA = ("NCCL_EP_COMBINE_NUM_", "NCCL_EP_DEBUG", "NCCL_EP_DISABLE_GUARD", "NCCL_EP_DISPATCH_COPY_MODE",
                  "NCCL_EP_DISPATCH_NUM_", "NCCL_EP_ENV_VERBOSE", "NCCL_EP_HOME", "NCCL_EP_HT_EM_",
                  "NCCL_EP_HT_GIN_", "NCCL_EP_HT_UNFUSED_SYNC", "NCCL_EP_JIT_", "NCCL_EP_PREPROCESS_NUM_SMS",
                  "NCCL_EP_SHUFFLE_SMS", "NCCL_EP_TOKEN")
_OTHERS = ("NCCL_HOME", "NCCL_HOSTID", "NCCL_COMM_ID", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "LD_PRELOAD",
           "LD_LIBRARY_PATH")
# What values may be, as in src/env: one of some words, or a number from 1 of something.
_WORDS = {"NCCL_EP_LL_COMBINE": ("reduce", "exact"), "NCCL_EP_NODE_SUMS": ("home", "invariant"),
          **dict.fromkeys(("NCCL_EP_CHECK", "NCCL_EP_PROGRAMMATIC", "NCCL_EP_HT_EM_LOCAL_DUP",
                           "NCCL_EP_HT_EM_NVLINK_DUP"), ("0", "1"))}
_NUMBERS = {"NCCL_EP_TIMEOUT_MS": "milliseconds", "NCCL_EP_HT_CHUNK_BYTES": "bytes",
            **dict.fromkeys(("NCCL_EP_COMM_SMS", "NCCL_EP_DISPATCH_SMS", "NCCL_EP_COMBINE_SMS"), "SMs")}
_LIBRARY = re.compile(r"/lib(nccl|nccl_ep|nccl_ep_2)\.so[.\d]*$")


def run() -> int:
    """Prints all of it; 1 if something is wrong."""
    wrong = False
    for line in report():
        # At once: what comes next may end the process.
        print(line, flush=True)
        wrong = wrong or line.startswith("!!")
    return int(wrong)


def report() -> Iterator[str]:
    """All lines."""
    yield f"ok nccl_ep {nccl_ep.__version__}, Python {platform.python_version()}, {platform.platform()}"
    # PyTorch first: programs import it before, and it brings its own NCCL.
    yield from _torch()
    yield from _libraries()
    yield from _environment()


def _libraries() -> Iterator[str]:
    """The library, NCCL, and others of their names that the process has."""
    try:
        path = find_library()
        library = NCCLLibrary(path)
    except (RuntimeError, OSError) as error:
        yield f"!! no library: {error}"
        return
    if not library.ep_available:
        yield f"!! {only_nccl(path)}"
        return
    if not library.has("ncclEpGetVersion"):
        yield f"!! {path}: another libnccl_ep, or an old one; NCCL_EP_LIBRARY chooses"
        return
    number = library.ncclEpGetVersion()
    yield f"ok libnccl_ep {number // 10000}.{number // 100 % 100}.{number % 100}: {path}"
    stand_ins = hasattr(ctypes.CDLL(None), "ncclEpHostsimAbi")
    used, others = other_copies_of_nccl(library.base)
    if stand_ins:
        yield f"-- the CPU stand-ins instead of NCCL and CUDA: {used}"
    else:
        yield f"ok NCCL {library.ncclGetVersion()}: {used}"
    for other in others:
        yield (f"!! another NCCL in this process: {other}; its communicators are invalid here, "
               "NCCL_EP_NCCL_LIBRARY chooses")
    for other, loaded in loaded_libraries():
        if _LIBRARY.search(other) and later_generation(loaded):
            yield f"-- NCCL EP of a later generation in this process, for others: {other}"
    yield from _gpus(stand_ins, path)


def _gpus(stand_ins: bool, library: str) -> Iterator[str]:
    """GPUs by the CUDA runtime that the process has."""
    if stand_ins:
        yield "-- operations run on the CPU"
        return
    torch = sys.modules.get("torch")
    if torch is None:
        yield "-- GPUs: PyTorch would tell"
        return
    if not torch.cuda.is_available():
        yield f"!! no GPU that PyTorch can use; {on_the_cpu(library)}"
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        peers = [str(other) for other in range(torch.cuda.device_count()) if other != index
                 and torch.cuda.can_device_access_peer(index, other)]
        reach = f"reaches GPUs {', '.join(peers)}" if peers else "reaches no other GPU"
        yield (f"ok GPU {index}: {facts.name}, sm_{facts.major}{facts.minor}, "
               f"{facts.multi_processor_count} SMs, {facts.total_memory >> 30} GiB, {reach}")


def _torch() -> Iterator[str]:
    """PyTorch, without which half of the package is missing."""
    if importlib.util.find_spec("torch") is None:
        yield "-- no PyTorch: NCCLLibrary works, EpGroup does not"
        return
    try:
        import torch
    except Exception as error:
        yield f"!! PyTorch cannot be imported: {type(error).__name__}: {error}"
        return
    yield f"ok PyTorch {torch.__version__}, CUDA {torch.version.cuda}"


def _environment() -> Iterator[str]:
    """Variables that count, and those that nothing reads."""
    for name, value in sorted(os.environ.items()):
        if name in VARIABLES or name in _OTHERS:
            yield f"-- {name}={value}"
        elif name.startswith(READ_BY_NVIDIA):
            yield f"-- {name}={value}, which this library does not read"
        elif name.startswith("NCCL_EP_") and name not in BUILD_VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.8)
            meant = f"; is {close[0]} meant?" if close else ""
            yield f"!! {name}={value} is not read by anything{meant}"
    yield from _refused_values()


def _refused_values() -> Iterator[str]:
    """Values that the library would not use, as far as they are numbers or words."""
    for name, allowed in _WORDS.items():
        value = os.environ.get(name)
        if value and value.strip() not in allowed:
            yield f"!! {name}={value} is not used: it is {' or '.join(allowed)}"
    for name, unit in _NUMBERS.items():
        value = os.environ.get(name)
        if value and not (value.strip().isdecimal() and int(value) > 0):
            yield f"!! {name}={value} is not used: it is a number of {unit}"
    file = os.environ.get("NCCL_EP_TUNING_FILE")
    if file and not os.path.exists(file):
        yield f"!! NCCL_EP_TUNING_FILE={file}: there is no such file"
