"""`EpGroup`: the ranks that exchange tokens, for torch."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, cast, overload

import torch

from nccl_ep.arguments import cannot_be_copied, integer, kind, require_dtype, require_group, row_bytes
from nccl_ep.choices import Choice, OperationName, Selector, Variant, in_c, number_of, variants
from nccl_ep.errors import NcclEpError, RemoteError, failure, in_python
from nccl_ep.heap import MappedMemory, PeerMemory
from nccl_ep.modes import Algorithm, Mode
from nccl_ep.nccl_wrapper import NCCLLibrary
from nccl_ep.operators.numbers import forget, register_configured
from nccl_ep.operators.traced import create_handle as traced_handle, is_traced
from nccl_ep.rendezvous import communicator
from nccl_ep.runtime import Runtime
from nccl_ep.tensors import checked_output
from nccl_ep.types import NCCL_EP_AUTO, ncclComm_t, ncclEpAlgorithm_t, ncclEpGroupConfig_t
from nccl_ep.views import Views

if TYPE_CHECKING:
    from nccl_ep.handle import EpHandle
    from nccl_ep.routed import Routed

_ALGORITHMS = {"ll": ncclEpAlgorithm_t.LOW_LATENCY, "ht": ncclEpAlgorithm_t.HIGH_THROUGHPUT}
ROW_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_REMEMBERED = 4  # operations that the text of a failure tells of
_A_RANK = re.compile(r"\brank \d")


class EpGroup(Generic[Mode]):
    """A group of ranks; creating and closing it are collective.

    num_experts          E, over all ranks; expert g lives on rank g // L, where L = E // R
    hidden               H, the largest row of a token, in elements of `dtype`: bfloat16, float16 or
                         float32; a multiple of 16 bytes
    algorithm            "ll" (low latency) or "ht" (high throughput)
    max_tokens_per_rank  M; 0, in HT only: each handle finds its own bound
    comm                 the ranks: a torch.distributed group, None for all processes (a process
                         that nothing has launched is alone), or an ncclComm_t, which then outlives
                         the group
    num_channels         bound of a kernel, 2 SMs for each channel; 0: the library chooses

    Tensors are on the GPU that is current now, or on the CPU if the process has the CPU stand-ins.
    `label`, a text, tells this group from others in texts of failures.
    """

    @overload
    def __init__(self: EpGroup[Literal["ll"]], num_experts: int, hidden: int, *,
                 algorithm: Literal["ll"] = "ll", max_tokens_per_rank: int,
                 dtype: torch.dtype = torch.bfloat16, comm: Any = None,
                 num_channels: int = NCCL_EP_AUTO) -> None: ...

    @overload
    def __init__(self: EpGroup[Literal["ht"]], num_experts: int, hidden: int, *,
                 algorithm: Literal["ht"], max_tokens_per_rank: int = NCCL_EP_AUTO,
                 dtype: torch.dtype = torch.bfloat16, comm: Any = None,
                 num_channels: int = NCCL_EP_AUTO) -> None: ...

    @overload
    def __init__(self: EpGroup[Algorithm], num_experts: int, hidden: int, *,
                 algorithm: Algorithm, max_tokens_per_rank: int = NCCL_EP_AUTO,
                 dtype: torch.dtype = torch.bfloat16, comm: Any = None,
                 num_channels: int = NCCL_EP_AUTO) -> None: ...

    def __init__(self, num_experts: int, hidden: int, *, algorithm: Algorithm = "ll",
                 max_tokens_per_rank: int = NCCL_EP_AUTO, dtype: torch.dtype = torch.bfloat16,
                 comm: Any = None, num_channels: int = NCCL_EP_AUTO) -> None:
        self._group: Any = None
        if algorithm not in ("ll", "ht"):
            raise ValueError(f"algorithm: must be 'll' or 'ht', not {algorithm!r}")
        require_dtype("dtype", dtype, ROW_TYPES)
        num_experts = integer("num_experts", num_experts, least=1)
        bytes_of_row = row_bytes("hidden", hidden, dtype)
        max_tokens_per_rank = integer("max_tokens_per_rank", max_tokens_per_rank)
        num_channels = integer("num_channels", num_channels)
        if not isinstance(comm, ncclComm_t):
            require_group("comm", comm)
        elif not comm.value:
            raise ValueError("comm: must not be NULL, as that of a torch.distributed group is before "
                             "its first collective")
        if algorithm == "ll" and max_tokens_per_rank == NCCL_EP_AUTO:
            raise ValueError("max_tokens_per_rank: must be 1 or more with algorithm 'll'; only "
                             "'ht' can do without")
        self._owned_comm: Any = None
        self._kept: set[Any] = set()
        self.totals: dict[Callable[..., None], torch.Tensor] = {}  # by the function that began to add to them
        self._in_use: list[object] = []
        self.views = Views()
        self.label = ""
        self.choices: dict[OperationName, Choice | None] = {}
        self.selector: Selector | None = None
        self._selector: Any = None
        self._exact = os.environ.get("NCCL_EP_LL_COMBINE", "").strip() == "exact"
        self._backward = ""
        self._last: collections.deque[str] = collections.deque(maxlen=_REMEMBERED)
        self.library = NCCLLibrary()
        self.runtime = Runtime(self.library)
        self.algorithm, self.num_experts, self.hidden = algorithm, num_experts, hidden
        self.max_tokens_per_rank, self.dtype = max_tokens_per_rank, dtype
        self.num_channels = num_channels
        config = ncclEpGroupConfig_t(
            version=1, algorithm=_ALGORITHMS[algorithm], num_experts=num_experts,
            max_tokens_per_rank=max_tokens_per_rank, token_size_bytes=bytes_of_row,
            num_channels=num_channels)
        run = self.runtime.interruptible
        with self.runtime.current():
            if not isinstance(comm, ncclComm_t):
                comm = self._owned_comm = communicator("comm", comm, self.library, run)
            self.comm = comm
            try:
                self.world_size = self.library.ncclCommCount(comm)
                self.rank = self.library.ncclCommUserRank(comm)
                self._group = run(self.library.ncclEpCreateGroup, comm, config, self.runtime.stream(None))
            except NcclEpError as error:
                self._destroy_comm()
                raise in_python(error) from None
            except Exception:
                self._destroy_comm()
                raise
        self._memory = PeerMemory(self)
        self.num_local_experts = num_experts // self.world_size
        self.number = register_configured(  # of operators
            self, self.world_size, num_experts, max_tokens_per_rank, dtype, algorithm)

    @property
    def device(self) -> torch.device:
        """The device of this group's tensors."""
        return self.runtime.device

    @property
    def handle(self) -> Any:
        """The ncclEpGroup_t, for calls to `library`."""
        if self._group is None:
            raise RuntimeError("the group is closed")
        return self._group

    @property
    def is_open(self) -> bool:
        """Whether the group is not closed yet."""
        return self._group is not None

    def heap(self, size: int) -> None:
        """Reserves `size` bytes, which may differ between ranks, for tensors of `empty`; collective, once.

        The ranks of a node map each other's. The heap ends with the group.
        """
        self._memory.reserve(size)

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor in the heap, of the group's type by default; local.

        Rows that come there, or from there, need not be copied; ranks may mix such tensors with others, of any
        offsets. The memory is free for the next one when the tensor and its views are gone. MemoryError if the heap
        has no room.
        """
        return self._memory.empty(shape, dtype if dtype is not None else self.dtype)

    def memory_pool(self, size: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """A context in which torch allocates from the heap, in this thread: from `size` bytes of it, those of the first
        call, by default the largest piece that is left. GPUs only; a `torch.cuda.MemPool`, with its rules."""
        return self._memory.pool(size)

    def register(self, tensor: torch.Tensor) -> None:
        """Lets the ranks of a node map this tensor's memory, as that of `empty`; collective.

        It must be memory of cudaMalloc, as torch's default allocator has, or of cuMemCreate with file descriptors, as
        torch's symmetric memory. The group keeps the tensor until `deregister`, or its end.
        """
        self._memory.register(tensor)

    def deregister(self, tensor: torch.Tensor) -> None:
        """Ends what `register` began; collective."""
        self._memory.deregister(tensor)

    def memory(self) -> list[MappedMemory]:
        """What of this rank's memory peers map: the heap, and registered tensors."""
        return self._memory.report()

    def statistics(self) -> dict[str, int]:
        """How many tensors of operations, HT's outputs of a dispatch and inputs of a combine, were in memory that peers
        map, and how many in other memory since the group has had some; and how many operations, on GPUs, passed rows
        through buffers though this rank's tensor was in such memory, as another rank's was not."""
        plain, fallbacks = self._memory.elsewhere()
        return {"mapped_tensors": sum(piece.tensors for piece in self.memory()), "plain_tensors": plain,
                "fallbacks": fallbacks}

    def create_handle(self, topk_idx: torch.Tensor, *, counts: torch.Tensor | None = None,
                      stream: Any = None) -> EpHandle[Mode]:
        """A handle for the routing `topk_idx`, some integers [T, K]; T may differ between ranks.

        Ids outside 0..E-1 take no part. Collective in HT, where `counts` int32 [L] gets the number
        of tokens that come here for each local expert, on the stream.
        """
        if is_traced(stream):
            return cast("EpHandle[Mode]", traced_handle(self, topk_idx, counts, stream))
        from nccl_ep.handle import EpHandle

        return EpHandle(self, topk_idx, counts=counts, stream=stream)

    def open_handle(self, *, expert_alignment: int = 0, max_rows: int | None = None) -> EpHandle[Mode]:
        """A handle without a routing, which `EpHandle.update` gives it; local.

        In HT the update can be captured in a CUDA graph, and with `expert_alignment`, a power of two, rows lie by
        expert: `EpHandle` says how. That needs max_tokens_per_rank. Of rows by expert those beyond `max_rows`, if
        given, are dropped: they add nothing to a combine. It may differ between ranks.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError("open_handle: not in code that is compiled; open the handle before, and update it there")
        from nccl_ep.handle import EpHandle

        return EpHandle(self, expert_alignment=expert_alignment, max_rows=max_rows)

    def most_rows(self, top_k: int, expert_alignment: int = 0, max_rows: int | None = None) -> int:
        """HT with max_tokens_per_rank: the rows that may come; by expert, those of top-k ids, with a handle's bound."""
        rows = self.world_size * self.max_tokens_per_rank
        slots = self.most_slots(rows, top_k, expert_alignment) if expert_alignment else rows
        return slots if max_rows is None else min(slots, max_rows)

    def most_slots(self, rows: int, top_k: int, expert_alignment: int) -> int:
        """The slots that so many rows of top-k ids may take by expert, filled up to the alignment."""
        local = self.num_local_experts
        slots = rows * min(top_k, local) + local * (expert_alignment - 1)
        return slots // expert_alignment * expert_alignment

    def variants(self, operation: OperationName) -> list[Variant]:
        """The ways to run "ll_combine", "ht_dispatch" or "ht_combine" that have names."""
        return variants(operation, self._exact)

    def set_choice(self, operation: OperationName, choice: Choice | None) -> None:
        """Runs `operation` in this way from now on, on this rank; None: as the library wants.

        A choice that is impossible counts as none. `ll.reduce` and `ll.exact` are the same on all
        ranks; all else is a matter of each. A graph keeps the choice of its capture.
        """
        number = number_of(operation)
        if not isinstance(choice, Choice | None):
            raise TypeError(f"choice: must be a Choice, not {kind(choice)}")
        self.call(self.library.ncclEpSetChoice, self.handle, number,
                  None if choice is None else choice.in_c())
        self.choices[operation] = choice

    def set_selector(self, select: Selector | None) -> None:
        """Asks `select` in each operation without a set choice; it gets a `Query` and returns a
        `Choice`, or None for the library's own. It must not use the group."""
        callback = in_c(select)
        self.call(self.library.ncclEpSetSelector, self.handle, callback)
        self.selector, self._selector = select, callback

    def retune(self, top_k: int, max_tokens: int = 0, **options: Any) -> dict[str, Any]:
        """Measures launch shapes on this group and runs its operations by them from now on:
        `nccl_ep.tuning.retune`. Collective."""
        from nccl_ep.tuning import retune

        return retune(self, top_k, max_tokens, **options)

    def keep(self, handle: Routed[Any]) -> None:
        """Keeps what a CUDA graph has captured, a handle and running totals, until the group is closed."""
        self._kept.update((handle, *self.totals.values()))

    def check(self) -> None:
        """Raises `NcclEpError` if an operation of the group has failed while running."""
        code = self.library.ncclEpGetAsyncError(self.handle)
        if code != 0:
            raise self.told(failure(code, self.library.ncclGetErrorString(code),
                                    self.library.ncclEpGetLastError()))

    def count_rows(self, rows: torch.Tensor | None) -> None:
        """From now on each dispatch adds the rows that each local expert receives to `rows`, int64 [L], which the group
        keeps as long as dispatches and graphs add; None ends that. Rank-major dispatches do not count. Local."""
        self._add_to("rows", rows, self.num_local_experts, self.library.ncclEpGroupCountRows)

    def time_waits(self, waits: torch.Tensor | None) -> None:
        """From now on each low-latency dispatch adds to `waits`, int64 [R], kept as `rows` of `count_rows`, how many
        nanoseconds it waits until each source rank has told what comes from there: how much later that began. None ends
        that. Local. Over several nodes waits for the network come before, and are not among them."""
        self._add_to("waits", waits, self.world_size, self.library.ncclEpGroupTimeWaits)

    def time_combine_waits(self, waits: torch.Tensor | None) -> None:
        """The same of combines: how many nanoseconds each waits until each rank has begun it, in high throughput until
        its first row comes. Over several nodes high throughput times only the ranks of its own node."""
        self._add_to("waits", waits, self.world_size, self.library.ncclEpGroupTimeCombineWaits)

    def _add_to(self, name: str, totals: torch.Tensor | None, length: int, function: Callable[..., None]) -> None:
        address = None
        if totals is not None:
            address = checked_output(name, totals, (length,), self.device, torch.int64).data_ptr()
        self.call(function, self.handle, address)
        self.totals.pop(function, None)
        if totals is not None:
            self.totals[function] = totals

    @contextlib.contextmanager
    def backward_of(self, operation: str) -> Iterator[None]:
        """What is enqueued meanwhile is the backward of this operation, in texts of failures."""
        before, self._backward = self._backward, operation
        try:
            yield
        finally:
            self._backward = before

    def note(self, operation: str) -> None:
        """Remembers an operation for the text of a failure."""
        self._last.append(f"backward of {self._backward}" if self._backward else operation)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A function of `library`, with errors in Python's words."""
        try:
            return function(*arguments)
        except NcclEpError as error:
            raise self.told(error) from None

    def told(self, error: NcclEpError) -> NcclEpError:
        """`error` in Python's words; where ranks differ, with the last calls of this one.

        A rank that leaves out a backward, say, makes the others wait, and the library knows numbers
        of operations only.
        """
        also = ""
        others = isinstance(error, RemoteError) or _A_RANK.search(error.detail)
        if others and self._last:
            where = f" in {self.label}" if self.label else ""
            also = f"; last calls of this rank{where}: {', '.join(self._last)}"
        return in_python(error, also)

    def settle(self, *used: object) -> None:
        """On the CPU: waits for enqueued work and raises its failure. Does nothing on GPUs.

        What is `used` by that work is kept until it has ended, also if Ctrl-C ends the wait before.
        """
        if self.device.type == "cpu":
            self._in_use.extend(used)
            try:
                self.runtime.settle()
            except RuntimeError:
                self._in_use.clear()
                self.check()
                raise
            self._in_use.clear()
            self.check()

    def close(self) -> None:
        """Destroys the group; collective. A second call does nothing."""
        group, self._group = self._group, None
        if group is None:
            return
        forget(self.number)
        if self._memory.end():
            warnings.warn("the group's heap is gone, but some tensor still has memory of it", ResourceWarning,
                          stacklevel=2)
        self.runtime.interruptible(self._end, group, self.runtime.stream(None))

    def _end(self, group: Any, stream: int | None) -> None:
        try:
            self.library.ncclEpGroupDestroy(group, stream)
        finally:
            self._kept.clear()
            self.totals.clear()
            self._in_use.clear()
            self._destroy_comm()

    def _destroy_comm(self) -> None:
        comm, self._owned_comm = self._owned_comm, None
        if comm is not None:
            self.library.ncclCommDestroy(comm)

    def __enter__(self) -> EpGroup[Mode]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        # After an exception the other ranks may never reach a collective call.
        if kind is None:
            self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        cannot_be_copied(self, "make one on every rank")

    def __repr__(self) -> str:
        state = "" if self._group is not None else ", closed"
        return (f"<EpGroup {self.algorithm}, rank {self.rank} of {self.world_size}, "
                f"{self.num_experts} experts, hidden {self.hidden} {self.dtype}, "
                f"max_tokens_per_rank {self.max_tokens_per_rank}, {self.device}{state}>")

    # At the end of the interpreter names of modules may be None already; defaults are not.
    def __del__(self, _warn: Callable[..., None] = warnings.warn,
                _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Closing is collective, and garbage collection runs at different times on each rank.
        if not _ending() and getattr(self, "_group", None) is not None:
            _warn("an EpGroup was not closed", ResourceWarning, stacklevel=2, source=self)
