"""Starts ranks for unit tests: `run(4, fn)`, without a launcher and without torch.distributed.

Each rank is a process that multiprocessing's spawn starts, so `fn` must be a function of a module
that it can import: that of a test is, what a terminal or a notebook defines is not, and a program
that calls `run` does so under `if __name__ == "__main__":`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import os
import pathlib
import pickle
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from nccl_ep.library_search import STAND_INS, file_of, find_library
from nccl_ep.rendezvous import LAUNCHERS_VARIABLES

_NCCL = "NCCL_EP_NCCL_LIBRARY"


class InRank(Exception):
    """The cause of an exception that `run` raises: it has the `rank` and its traceback."""

    def __init__(self, rank: int, ranks: int, trace: str) -> None:
        super().__init__(f"in rank {rank} of {ranks}:\n\n{trace}")
        self.rank = rank


class _Rank(NamedTuple):
    process: SpawnProcess
    results: Connection


class _Outcome(NamedTuple):
    result: Any = None
    error: BaseException | None = None
    trace: str = ""


def run(ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0,
        stand_ins: bool = False) -> list[Any]:
    """Calls `fn` with its rank, `ranks` and `args` in so many new processes; their results by rank.

    There an `EpGroup` without `comm`, and torch.distributed without a store, have these ranks.
    Each has a GPU of its own, which is current; where PyTorch sees none, and with `stand_ins`, they
    run on the CPU stand-ins. `fn`, `args` and results are pickled. The first exception of a rank is
    raised here, with an `InRank` as its cause, and ends the others; TimeoutError after `timeout`
    seconds.
    """
    if ranks < 1:
        raise ValueError(f"ranks: must be 1 or more, not {ranks}")
    _require_importable(fn)
    settings = {**_device_settings(ranks, stand_ins), **_job_settings(ranks)}
    call = pickle.dumps((fn, args))
    deadline = time.monotonic() + timeout
    started: list[_Rank] = []
    try:
        for rank in range(ranks):
            started.append(_start(rank, ranks, settings, call))
        results = _results(started, deadline)
        _wait_for_ends(started, deadline)
    except TimeoutError as error:
        if isinstance(error.__cause__, InRank):  # what `fn` has raised
            raise
        raise TimeoutError(f"{error} of {ranks} after {timeout:g} s") from None
    finally:
        for each in started:
            each.process.kill()
            each.process.join()
            each.results.close()
    return results


def number_of_gpus() -> int:
    """Those that ranks would run on: what PyTorch can use, unless NCCL_EP_NCCL_LIBRARY names the
    stand-ins."""
    if _has_stand_ins() or importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def _require_importable(fn: Callable[..., Any]) -> None:
    """Raises ValueError for a function of a terminal or notebook, which no other process can find."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    # Spawn runs the file of the program in any case; that of standard input has a name only.
    missing = file is not None and not os.path.exists(file)
    own = getattr(fn, "__module__", None) == "__main__" and file is None
    if getattr(main, "__spec__", None) is None and (missing or own):
        raise ValueError("fn: must be in a module that other processes can import, not in a terminal, "
                         "a notebook or standard input: write it to a file and import that")


def _device_settings(ranks: int, stand_ins: bool) -> dict[str, str]:
    """The environment that decides between GPUs and stand-ins."""
    gpus = 0 if stand_ins else number_of_gpus()
    if ranks <= gpus:
        return {}
    if gpus > 0:
        raise ValueError(f"ranks: {ranks} are more than the {gpus} GPUs here; with stand_ins=True "
                         "they run on the CPU")
    settings = {_NCCL: _find_stand_ins()}
    # They refuse on a machine with a GPU, as long as nobody wants just that.
    return {**settings, "NCCLEP_HOSTSIM_WITH_GPU": "1"} if stand_ins else settings


def _has_stand_ins() -> bool:
    return STAND_INS in os.environ.get(_NCCL, "")


def _find_stand_ins() -> str:
    """Their path: NCCL_EP_NCCL_LIBRARY if it names them; beside libnccl_ep.so; in target/release of
    the sources."""
    if _has_stand_ins():
        return os.environ[_NCCL]
    folders = [_folder_of_library(),
               pathlib.Path(__file__).resolve().parents[2] / "target" / "release"]
    for folder in folders:
        if (folder / STAND_INS).exists():
            return str(folder / STAND_INS)
    raise RuntimeError(
        f"no GPU is used, and the CPU stand-ins, {STAND_INS}, are neither in "
        f"{' nor in '.join(map(str, folders))}: set {_NCCL} to their path; wheels have them, `make lib` builds them")


def _folder_of_library() -> pathlib.Path:
    library = find_library()
    if os.sep not in library:
        library = file_of(ctypes.CDLL(library), "ncclGetVersion") or library
    return pathlib.Path(library).resolve().parent


def _job_settings(ranks: int) -> dict[str, str]:
    """What torchrun would set for all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"nccl_ep.testing.{secrets.token_hex(8)}"}


def _start(rank: int, ranks: int, settings: dict[str, str], call: bytes) -> _Rank:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    own = {**settings, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    process = context.Process(target=_in_rank, args=(rank, ranks, own, call, there),
                              name=f"rank {rank} of {ranks}")
    with there:  # The pipe ends with the rank.
        process.start()
    return _Rank(process, here)


def _results(started: list[_Rank], deadline: float) -> list[Any]:
    """What the ranks return; raises what the first of them raises."""
    results: dict[int, Any] = {}
    while missing := [rank for rank in range(len(started)) if rank not in results]:
        ready = wait([started[rank].results for rank in missing], max(0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"no result of ranks {missing}")
        for rank in missing:
            if started[rank].results in ready:
                results[rank] = _result(started[rank], rank, len(started))
    return [results[rank] for rank in range(len(started))]


def _result(started: _Rank, rank: int, ranks: int) -> Any:
    try:
        outcome: _Outcome = pickle.loads(started.results.recv_bytes())
    except EOFError:
        started.process.join()
        raise RuntimeError(f"{_end(started)}, without a result") from None
    if outcome.error is not None:
        raise outcome.error from InRank(rank, ranks, outcome.trace)
    return outcome.result


def _wait_for_ends(started: list[_Rank], deadline: float) -> None:
    """Until no rank runs; raises RuntimeError for one that crashes after its result."""
    for rank, each in enumerate(started):
        each.process.join(max(0, deadline - time.monotonic()))
        if each.process.exitcode is None:
            raise TimeoutError(f"with its result, but still running: rank {rank}")
        if each.process.exitcode != 0:
            raise RuntimeError(f"{_end(each)}, after its result")


def _end(started: _Rank) -> str:
    code = started.process.exitcode or 0
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    return f"{started.process.name} ended by {how}"


def _in_rank(rank: int, ranks: int, settings: dict[str, str], call: bytes,
             results: Connection) -> None:
    """What a new process does. `fn` comes as bytes, as its module may load libraries."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _set_environment(settings)
    try:
        fn, args = pickle.loads(call)
        _take_device(rank)
        sent = pickle.dumps(_Outcome(fn(rank, ranks, *args)))
    # pytest's outcomes, too, but no end of the process.
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        sent = pickle.dumps(_Outcome(error=_sendable(error), trace=trace))
    with results:
        results.send_bytes(sent)


def _end_with_parent() -> None:
    """So that a test that is killed leaves no ranks behind, on GPUs say."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _set_environment(settings: dict[str, str]) -> None:
    for name in LAUNCHERS_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(settings)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's name may lead nowhere
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun does
        if torch := sys.modules.get("torch"):  # which the program's own file has imported
            torch.set_num_threads(1)


def _take_device(rank: int) -> None:
    """Makes GPU `rank` current, unless these are the stand-ins."""
    if _has_stand_ins():
        return
    import torch

    torch.cuda.set_device(rank)


def _sendable(error: BaseException) -> BaseException:
    """The exception, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception_only(error)).strip())
    return error
