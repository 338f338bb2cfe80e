"""The device of operations: a stream of a GPU, or the CPU stand-ins, where every call waits."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from nccl_ep.library_search import on_the_cpu, only_nccl
from nccl_ep.nccl_wrapper import NCCLLibrary

_NOT_READY = 600  # cudaErrorNotReady
_LONGEST_PAUSE = 1e-3  # seconds
_LONGEST_WAIT = 0.1
_BULK_COPIES = (9, 0)  # compute capability
_Result = TypeVar("_Result")


_found: list[bool] = []  # whether they are the stand-ins, once a `Runtime` is there: asking the loader takes long


def uses_stand_ins() -> bool:
    """Whether this process has the CPU stand-ins instead of CUDA; they load together with NCCL."""
    return _found[0] if _found else hasattr(ctypes.CDLL(None), "ncclEpHostsimAbi")


_streams: dict[tuple[int, int], Any] = {}


def current_stream(device: int | None = None) -> Any:
    """Of this GPU, or of the current one; torch takes several times as long to make an object of it."""
    number = torch.cuda.current_device() if device is None else device
    key = number, torch._C._cuda_getCurrentRawStream(number)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(number)
    return stream


class on_stream:
    """As `torch.cuda.stream`, in less time."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._device = torch.cuda.current_device()
        self._before = current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._before)
        if self._device != self._before.device_index:
            torch.cuda.set_device(self._device)


def capabilities() -> dict[str, Any]:
    """What this process's library and device can do, without a group: backend, "cuda" or "cpu" (the CPU stand-ins), or
    None without a GPU; library and version; nccl, the version; peer_memory: whether groups have memory that peers map;
    on GPUs also gpu, compute_capability and bulk_copies, by which kernels move rows where the GPU has them."""
    library = NCCLLibrary()
    on_cpu = uses_stand_ins()
    found: dict[str, Any] = {
        "backend": "cpu" if on_cpu else "cuda" if torch.cuda.is_available() else None,
        "library": library.path, "version": library.ncclEpGetVersion(), "nccl": library.ncclGetVersion(),
        "peer_memory": library.has("ncclEpMemAlloc")}
    if found["backend"] == "cuda":
        capability = torch.cuda.get_device_capability()
        found.update(gpu=torch.cuda.get_device_name(), compute_capability=capability,
                     bulk_copies=capability >= _BULK_COPIES)
    return found


class Runtime:
    """The device of a group."""

    def __init__(self, library: NCCLLibrary) -> None:
        if not library.has("ncclEpCreateGroup"):
            raise RuntimeError(only_nccl(library.path))
        host = uses_stand_ins()
        if not (host or torch.cuda.is_available()):
            raise RuntimeError(f"no GPU that PyTorch can use; {on_the_cpu(library.path)}")
        _found[:] = [host]
        # Not the process's own symbols: PyTorch may have loaded a CUDA runtime that precedes them.
        self._stand_ins = library.base if host else None
        if self._stand_ins is not None:
            # Bound once: a look-up makes a function and a type for it, which only the garbage collector frees.
            self._record, self._query, self._synchronize = (
                self._stand_ins[name] for name in ("cudaEventRecord", "cudaEventQuery", "cudaStreamSynchronize"))
            self._reached = ctypes.c_void_p()
            self._stand_ins["cudaEventCreate"](ctypes.byref(self._reached))
            end = weakref.finalize(self, self._stand_ins["cudaEventDestroy"], self._reached)
            end.atexit = False  # type: ignore[misc, unused-ignore]
        self.device = (torch.device("cpu") if host
                       else torch.device("cuda", torch.cuda.current_device()))
        # torch takes an index faster than a device.
        self._number = self.device.index
        # If there is a heap, which torch does not own: told of tensors and their stream; None is the current one.
        self.note_use: Callable[[Iterable[torch.Tensor], Any], None] | None = None

    def current(self) -> AbstractContextManager[Any]:
        """Makes the device current, for calls that need it."""
        if self._stand_ins is not None:
            return contextlib.nullcontext()
        return torch.cuda.device(self._number)

    def interruptible(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """What a function returns that may wait for other ranks, with the device current.

        Python handles Ctrl-C between two steps of the main thread, so not while that is in C: the function runs in
        another thread. Ctrl-C ends the wait for it; the call itself goes on, and keeps its arguments.
        """
        outcome: Future[_Result] = Future()
        thread = threading.Thread(target=self._run, args=(outcome, function, arguments), name="nccl_ep", daemon=True)
        try:
            if threading.current_thread() is threading.main_thread():
                with contextlib.suppress(RuntimeError):  # of Python's end, as in atexit: from 3.12 on none starts there
                    thread.start()
                # A signal just before a wait does not end that: so each is short.
                while thread.is_alive():
                    thread.join(_LONGEST_WAIT)
            if not outcome.done():
                self._run(outcome, function, arguments)
            return outcome.result()
        finally:
            del outcome  # whose error has this frame

    def _run(self, outcome: Future[_Result], function: Callable[..., _Result], arguments: tuple[Any, ...]) -> None:
        try:
            with self.current():
                outcome.set_result(function(*arguments))
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            del outcome

    def stream(self, stream: Any) -> int | None:
        """The address of a torch stream; by default of the current one."""
        if self._stand_ins is not None:
            if stream is not None:
                raise ValueError("stream: there are no streams on the CPU")
            return None
        if stream is None:
            address: int = torch._C._cuda_getCurrentRawStream(self._number)
            return address
        try:
            return int(stream.cuda_stream)
        except AttributeError:
            raise TypeError("stream: must be a torch.cuda.Stream, not "
                            f"{type(stream).__name__}") from None

    def follow(self, stream: Any) -> None:
        """Makes `stream` wait for the current one, which may still fill or use the same tensors."""
        if stream is None or self._stand_ins is not None:
            return
        self.stream(stream)  # Refuses what is no stream.
        if stream != (current := current_stream(self._number)):
            stream.wait_stream(current)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes `stream` the current one, if it is not None."""
        if stream is None or self._stand_ins is not None:
            return contextlib.nullcontext()
        return torch.cuda.stream(stream)

    def is_capturing(self, stream: Any) -> bool:
        """Whether `stream` is being captured in a CUDA graph; the device must be current."""
        if self._stand_ins is not None:
            return False
        return torch.cuda.is_current_stream_capturing() if stream is None else _is_capturing(stream)

    def current_stream(self) -> Any:
        """The current stream; None on the CPU."""
        return None if self._stand_ins is not None else current_stream(self._number)

    def event(self) -> Any:
        """Marks what the current stream has been given; None on the CPU."""
        return None if self._stand_ins is not None else current_stream(self._number).record_event()

    def wait_for_event(self, stream: Any, event: Any) -> None:
        """Makes `stream`, None for the current one, wait for `event`, if it is one. A captured stream may not wait for
        what was not captured, and need not: a capture begins when that has ended."""
        if event is not None and not self.is_capturing(stream):
            (self.current_stream() if stream is None else stream).wait_event(event)

    def wait_for(self, streams: Iterable[Any]) -> None:
        """Makes the current stream wait for what others have been given."""
        for stream in streams:
            self.current_stream().wait_stream(stream)

    def hand_over(self, stream: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Keeps the memory of `tensors` from being given away while `stream` still uses it.

        They were made on the current stream, which needs no such protection, or in a heap.
        """
        if stream is not None and stream != current_stream(self._number):
            self.keep_for(stream, tensors)
        elif self.note_use is not None:
            self.note_use(tensors, stream)

    def keep_for(self, stream: Any, tensors: Iterable[torch.Tensor]) -> None:
        """`hand_over` for tensors of any stream; `stream` None is the current one."""
        if self._stand_ins is not None:
            return
        chosen = stream if stream is not None else current_stream(self._number)
        tensors = list(tensors)
        for tensor in tensors:
            tensor.record_stream(chosen)
        if self.note_use is not None:
            self.note_use(tensors, chosen)

    @contextlib.contextmanager
    def device_copy(self, tensor: torch.Tensor) -> Iterator[int]:
        """The address of a copy of `tensor`, of the CPU, in memory that NCCL takes; what is there
        in the end is copied back, once the current stream has come to it."""
        if self._stand_ins is None:
            copy = tensor.to(self.device)
            yield copy.data_ptr()
            tensor.copy_(copy)
            return
        # The NCCL of the stand-ins, as a real one, takes no memory but CUDA's.
        address, size = ctypes.c_void_p(), ctypes.c_size_t(tensor.nbytes)
        here, default = ctypes.c_void_p(tensor.data_ptr()), 4
        if self._stand_ins["cudaMalloc"](ctypes.byref(address), size) != 0:
            raise MemoryError(f"{tensor.nbytes} bytes for an exchange")
        try:
            self._stand_ins["cudaMemcpy"](address, here, size, default)
            yield address.value or 0
            self.settle()
            self._stand_ins["cudaMemcpy"](here, address, size, default)
        finally:
            self._stand_ins["cudaFree"](address)

    def settle(self) -> None:
        """On the CPU, waits for enqueued work: torch has no streams there that could wait. Ctrl-C ends the wait."""
        if self._stand_ins is not None:
            # An event of the default stream stands for all streams.
            self._record(self._reached, None)
            pause = _LONGEST_PAUSE / 64
            while self._query(self._reached) == _NOT_READY:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            result = self._synchronize(None)
            if result != 0:
                raise RuntimeError(f"an operation failed while it ran (CUDA error {result})")


def new_event(timing: bool = False) -> torch.cuda.Event:
    """An event of the current GPU; torch leaves its constructor untyped."""
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call, unused-ignore]


class Use:
    """The end of the last use of memory on this GPU, for those that use it next: `with use:`, also if it fails."""

    def __init__(self, device: torch.device) -> None:
        self._number = device.index
        self._end = new_event() if device.type == "cuda" else None
        self._stream: Any = None
        self._is_captured = False

    def note(self) -> None:
        """A use has been enqueued on the current stream."""
        if self._end is not None:
            self._stream = current_stream(self._number)
            self._is_captured = torch.cuda.is_current_stream_capturing()
            if not self._is_captured:
                self._end.record(self._stream)

    def current_stream_wait(self) -> None:
        """Makes the current stream wait, unless it is the same. What is captured waits only for its own graph, and
        nothing else for it, as CUDA allows no more; who replays it orders it."""
        if (self._stream is None or (current := current_stream(self._number)) == self._stream
                or torch.cuda.is_current_stream_capturing() != self._is_captured):
            return
        if not self._is_captured:
            current.wait_event(self._end)
        elif _is_capturing(self._stream):  # else its graph has ended
            current.wait_stream(self._stream)

    __enter__ = current_stream_wait

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # Where an operation has broken the device, its own error is what counts.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(RuntimeError):
            self.note()


def _is_capturing(stream: Any) -> bool:
    with on_stream(stream):
        return torch.cuda.is_current_stream_capturing()


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` for a use on the current stream, which need not be that which it was made on: its memory stays until the
    use has run."""
    if tensor.is_cuda:
        tensor.record_stream(current_stream(tensor.device.index))
    return tensor


class HostCopy:
    """Host memory to which tensors of one shape are copied asynchronously, one at a time.

    Pinned memory and an event, created once: creating them takes as long as a kernel launch.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        # On the host whatever torch's default device is, and usable outside inference mode, too.
        with torch.inference_mode(False):
            self._copy = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=on_gpu)
        self._arrived = new_event() if on_gpu else None

    def start(self, tensor: torch.Tensor) -> None:
        """Enqueues a copy of `tensor` on the current stream."""
        self._copy.copy_(tensor, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record(current_stream(tensor.device.index))

    def wait(self) -> torch.Tensor:
        """Waits for the copy and returns it; the next `start` overwrites it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy
