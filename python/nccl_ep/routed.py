"""What a handle has beside its operations: its routing, and its life."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn

import torch

from nccl_ep.arguments import cannot_be_copied, integer
from nccl_ep.gradients import is_transformed, plain, without_transforms
from nccl_ep.modes import Mode
from nccl_ep.operators.numbers import forget, register
from nccl_ep.operators.traced import is_traced, update as traced_update
from nccl_ep.tensors import Tag, TensorList, checked_integers, checked_output, describe, written

if TYPE_CHECKING:
    from typing_extensions import Self

    from nccl_ep.group import EpGroup


_LONGEST_WAIT = 100  # milliseconds


class Routed(Generic[Mode]):
    """The base of `EpHandle`."""

    def __init__(self, group: EpGroup[Mode], topk_idx: torch.Tensor | None = None, *,
                 counts: torch.Tensor | None = None, stream: Any = None, expert_alignment: int | None = None,
                 max_rows: int | None = None) -> None:
        """For these ids; with an `expert_alignment`, even 0, without a routing."""
        self._handle: Any = None
        self._staged: list[torch.Tensor] = []
        self._staged_on: int | None = None
        self.staged_outputs: list[torch.Tensor] = []
        # In traced code also what it got.
        self.staged_inputs: list[torch.Tensor] = []
        self._rows: int | None = None
        self._by_rank = False
        self.is_captured = False
        # How often it has got one.
        self.routing = 0
        self.number = register(self)  # of operators
        self.group = group
        # The library does, and gives gradients of weights by k.
        self.keeps_ids = expert_alignment is not None and group.algorithm == "ht"
        self.expert_alignment = 0
        self.max_rows: int | None = None
        if expert_alignment is None:
            self._route(topk_idx, counts, stream, self._create)
            return
        self.expert_alignment = integer("expert_alignment", expert_alignment) or int(max_rows is not None)
        self.max_rows = None if max_rows is None else integer("max_rows", max_rows)
        if max_rows is not None and group.algorithm == "ll":
            raise ValueError("max_rows: needs high throughput, whose rows may lie by expert")
        with torch.inference_mode(False):  # else no backward of compiled code can save them
            self.topk_idx = torch.empty((0, 0), dtype=torch.int64, device=group.device)
            # Of operators: those of traced code wait for the one that has made the routing.
            self.ticket = torch.empty(0, dtype=torch.int32, device=group.device)
        self.num_tokens = self.top_k = 0
        self._ids_kept_for: set[int | None] = set()
        self._ids_copied: Any = None
        with group.runtime.current():
            if self.max_rows is None:
                self._handle = group.call(group.library.ncclEpHandleOpen, group.handle, self.expert_alignment)
            else:
                self._handle = group.call(group.library.ncclEpHandleOpenBounded, group.handle, self.expert_alignment,
                                          self.max_rows)

    def update(self, topk_idx: torch.Tensor, *, counts: torch.Tensor | None = None, stream: Any = None) -> None:
        """Routes by `topk_idx` from now on; arguments as of `EpGroup.create_handle`, and as collective.

        In HT with a handle of `open_handle` it may be captured in a CUDA graph, on one node: each replay routes by the
        ids that are in `topk_idx` then. What follows in the graph needs max_tokens_per_rank, or `out`.
        """
        if is_traced(stream):
            traced_update(self, topk_idx, counts, stream)
        else:
            self._route(topk_idx, counts, stream, self._update)

    def reread(self, topk_idx: torch.Tensor) -> None:
        """LL: as `update` by ids that lie where the last ones did, as many; no call is needed for these. They may be of
        any stream: the allocator is told of each that uses them."""
        self.topk_idx = topk_idx
        self._ids_kept_for = set()

    def drop_ids(self) -> None:
        """LL: lets go of the ids' memory; no operation may follow before `reread` or `update`."""
        self.topk_idx = self.topk_idx.new_empty((0, self.top_k))

    def _route(self, topk_idx: Any, counts: torch.Tensor | None, stream: Any,
               call: Callable[[torch.Tensor, TensorList, int | None], None]) -> None:
        """Calls the library with the ids, a counter and the address of the stream."""
        if is_transformed():
            topk_idx = plain("topk_idx", topk_idx)
            counts = None if counts is None else plain("counts", counts)
            with without_transforms():
                self._route(topk_idx, counts, stream, call)
            return
        group = self.group
        ids = checked_integers("topk_idx", topk_idx, ("T", "K"), group.device)
        if counts is not None:
            counts = checked_output("counts", counts, (group.num_local_experts,), group.device,
                                    torch.int32)
        counter = TensorList((Tag.RECV_EXPERT_COUNTER_DEVICE, counts))
        group.runtime.follow(stream)
        with group.runtime.current():
            address = group.runtime.stream(stream)
            if group.algorithm == "ht" and group.device.type == "cpu":  # waits for the other ranks
                group.runtime.interruptible(call, ids, counter, address)
            else:
                call(ids, counter, address)
            if self.keeps_ids:
                self._keep_if_captured(stream)
        group.runtime.hand_over(stream, [ids, *counter.tensors])
        written(counter.tensors)
        self.topk_idx, self._rows = ids, None
        self.routing += 1
        self.num_tokens, self.top_k = ids.shape
        # The streams for which the allocator keeps the ids. It keeps a copy, which nobody else
        # knows of, for the stream that it was made on.
        self._ids_kept_for = {group.runtime.stream(None), group.runtime.stream(stream)}
        self._ids_copied = None
        if group.algorithm == "ht" and not self.keeps_ids and ids.data_ptr() == topk_idx.data_ptr():
            # A dispatch with weights finds them by the ids. Behind the exchange, which others wait
            # for.
            with group.runtime.on(stream):
                self.topk_idx = ids.clone()
                self._ids_copied = group.runtime.event()
            self._ids_kept_for = {group.runtime.stream(stream)}

    def _create(self, ids: torch.Tensor, counter: TensorList, stream: int | None) -> None:
        group, routing = self.group, describe(ids, Tag.TOPK_IDX)
        self._handle = group.call(group.library.ncclEpCreateHandle, group.handle, routing, None, stream,
                                  counter.descriptors)

    def _update(self, ids: torch.Tensor, counter: TensorList, stream: int | None) -> None:
        group, routing = self.group, describe(ids, Tag.TOPK_IDX)
        group.call(group.library.ncclEpHandleUpdate, self.handle, routing, counter.descriptors, stream)

    @property
    def handle(self) -> Any:
        """The ncclEpHandle_t, for calls to the library."""
        if self._handle is None:
            raise RuntimeError("the handle is closed")
        return self._handle

    @property
    def num_recv_tokens(self) -> int:
        """HT: rows that a dispatch can deliver here; the exact count if the group has no bound M.
        """
        return self._ask_rows(None)

    def _ask_rows(self, stream: Any) -> int:
        """The same, for an operation on `stream`."""
        if self._rows is None:
            if not self.group.max_tokens_per_rank and self.group.runtime.is_capturing(stream):
                raise RuntimeError("num_recv_tokens: a CUDA graph is captured, whose replays may have other numbers; "
                                   "pass out, with room for all, or make the group with max_tokens_per_rank")
            ask, rows = self.group.library.ncclEpHandleWaitNumRecvTokens, None
            while rows is None:  # Python handles Ctrl-C between two steps
                rows = self.group.call(ask, self.handle, _LONGEST_WAIT)
            self._rows = int(rows)
        return self._rows

    def close(self) -> None:
        """Destroys the handle; local. A second call does nothing."""
        handle, self._handle = self._handle, None
        self._staged, self.staged_outputs, self.staged_inputs = [], [], []
        forget(self.number)
        if handle is not None:
            self.group.library.ncclEpHandleDestroy(handle)

    def _keep_if_captured(self, stream: Any) -> None:
        """If `stream` is captured, keeps the handle: replays of the graph use it."""
        if self.group.runtime.is_capturing(stream):
            self.is_captured = True
            self.group.keep(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        cannot_be_copied(self, "group.create_handle(topk_idx) makes another")

    def __repr__(self) -> str:
        state = ", closed" if self._handle is None else ", staged" if self._staged else ""
        return (f"<EpHandle of {self.num_tokens} tokens, top-{self.top_k}{state}, "
                f"{self.group!r}>")

    # At the end of the interpreter the names that `close` needs may be None already, and the
    # process gives everything back. One that was refused has a number only.
    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending() and hasattr(self, "number"):
            self.close()
