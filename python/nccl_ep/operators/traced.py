"""`EpHandle` in code that is traced: by torch.compile, torch.export, make_fx or FakeTensorMode.

Operators cost the host about 10 microseconds more for a call, so `EpHandle` calls the library itself
otherwise. Here are the operators under the methods of a handle.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from nccl_ep.operators import ht, ll
from nccl_ep.operators.numbers import find, of_ticket
from nccl_ep.results import DispatchResult, result_class
from nccl_ep.row_layout import RowLayout, check_weights_of_combine, checked_layout
from nccl_ep.scales import CastName, ScalesOrder
from nccl_ep.views import check_view

if TYPE_CHECKING:
    from nccl_ep.choices import Choice
    from nccl_ep.group import EpGroup
    from nccl_ep.handle import EpHandle
    from nccl_ep.routed import Routed

# Bound once: each call of an operation asks both.
_is_compiling = torch.compiler.is_compiling
_modes = torch._C._len_torch_dispatch_stack


def is_traced(stream: Any = None) -> bool:
    """Whether a call now is to become operators.

    Operators know no `stream`: with one, modes that look at a running program, such as one that counts
    operations, do not see the call.
    """
    return _is_compiling() or stream is None and _modes() > 0


def runs_now(tensor: torch.Tensor) -> bool:
    """Whether traced code is running, and a mode only looks on: then what operators return is there."""
    return (not _is_compiling()
            and getattr(type(tensor), "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__
            and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None)


class TracedHandle:
    """A routing of high throughput in traced code, where `EpGroup.create_handle` returns it.

    It has the methods of `EpHandle`; its ticket keeps the handle that is made when the code runs, unless one of
    `EpGroup.open_handle` was `opened` before.
    """

    def __init__(self, group: EpGroup[Any], topk_idx: torch.Tensor, ticket: torch.Tensor,
                 opened: EpHandle[Any] | None = None) -> None:
        self.group, self.topk_idx, self.ticket = group, topk_idx, ticket
        self.num_tokens, self.top_k = topk_idx.shape
        self._number, self._alignment = (0, 0) if opened is None else (opened.number, opened.expert_alignment)
        self._max_rows = None if opened is None else opened.max_rows

    @property
    def num_recv_tokens(self) -> int:
        """`EpHandle.num_recv_tokens`; without a bound M only of code that runs, under a mode of torch."""
        group = self.group
        if group.max_tokens_per_rank:
            return group.most_rows(self.top_k, self._alignment, self._max_rows)
        handle = find("handle", self._number) if self._number else of_ticket("handle", self.ticket)
        rows: int = handle.num_recv_tokens
        return rows

    def update(self, topk_idx: torch.Tensor, *, counts: torch.Tensor | None = None, stream: Any = None) -> None:
        """`EpHandle.update`: by a new handle."""
        made = create_handle(self.group, topk_idx, counts, stream)
        self.topk_idx, self.ticket = made.topk_idx, made.ticket
        self.num_tokens, self.top_k = made.num_tokens, made.top_k

    def dispatch(self, tokens: torch.Tensor, topk_weights: torch.Tensor | None = None, *,
                 layout: RowLayout = "expert", scales: torch.Tensor | None = None,
                 cast: CastName | None = None, scales_order: ScalesOrder = "row",
                 out: torch.Tensor | None = None, out_scales: torch.Tensor | None = None,
                 send_only: bool = False, stream: Any = None, view: bool = False,
                 choice: Choice | None = None) -> DispatchResult:
        """`EpHandle.dispatch`; what is given as `out` is copied to."""
        if choice is not None:
            from nccl_ep.choices import chosen  # which asks this module

            with chosen(self.group, "dispatch", choice, tokens):
                return self.dispatch(tokens, topk_weights, layout=layout, scales=scales, cast=cast,
                                     scales_order=scales_order, out=out, out_scales=out_scales, stream=stream,
                                     view=view)
        check_view(view, checked_layout(layout, "ht", topk_weights is not None), out is not None)
        _check_stream(stream)
        rows = None if out is None else out.shape[0]
        if rows is None and self._alignment and self.group.max_tokens_per_rank and torch.is_grad_enabled():
            rows = self.num_recv_tokens  # the operator makes zeros then, as gradients may be recorded
        where = self.ticket, self._number, self.group.number, rows
        has_weights, is_scaled = topk_weights is not None, scales is not None or cast is not None
        has_ids = has_weights and not self._alignment
        row_scales = ids = weights = None
        if is_scaled:
            received, row_scales, ids, weights = ht.ht_dispatch_scaled(
                tokens, scales, topk_weights, self.topk_idx, cast, scales_order, *where)
            row_scales = _given(row_scales, out_scales)
        elif has_weights:
            received, ids, weights = ht.ht_dispatch_weighted(tokens, topk_weights, self.topk_idx, *where)
        else:
            received = ht.ht_dispatch(tokens, self.topk_idx, *where, False)
        return result_class(False, has_ids, is_scaled)(
            _given(received, out), None, ids if has_ids else None, weights if has_weights else None, row_scales)

    def combine(self, tokens: torch.Tensor, topk_weights: torch.Tensor | None = None, *,
                out: torch.Tensor | None = None, send_only: bool = False, stream: Any = None,
                choice: Choice | None = None) -> torch.Tensor:
        """`EpHandle.combine`; what is given as `out` is copied to."""
        if choice is not None:
            from nccl_ep.choices import chosen

            with chosen(self.group, "combine", choice, tokens):
                return self.combine(tokens, topk_weights, out=out, stream=stream)
        _check_stream(stream)
        check_weights_of_combine("ht", False, topk_weights is not None)
        sums = ht.ht_combine(tokens, self.topk_idx, self.ticket, self._number, self.group.number, False)
        return _given(sums, out)

    def combine_with_weights(self, tokens: torch.Tensor, topk_weights: torch.Tensor, *,
                             stream: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """`EpHandle.combine_with_weights`."""
        _check_stream(stream)
        sums, weights = ht.ht_combine_with_weights(tokens, topk_weights, self.topk_idx, self.ticket, self._number,
                                                   False)
        return sums, weights

    def complete(self, *, stream: Any = None) -> None:
        """Does nothing: high throughput stages no operations."""

    def close(self) -> None:
        """Does nothing: the handle ends with its ticket."""

    def __enter__(self) -> TracedHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TracedLowLatency:
    """A handle of low latency, made before, in traced code."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def dispatch(self, tokens: torch.Tensor, topk_weights: torch.Tensor | None = None, *,
                 scales: torch.Tensor | None = None, cast: CastName | None = None,
                 scales_order: ScalesOrder = "row", out: torch.Tensor | None = None,
                 out_scales: torch.Tensor | None = None, send_only: bool = False,
                 stream: Any = None) -> DispatchResult:
        """`EpHandle.dispatch`; what is given as `out` is copied to."""
        _check_stream(stream)
        handle, group = self.handle, self.handle.group
        _refuse_staged_output(send_only, out, out_scales)
        rows, counts, row_scales, ids, weights = ll.ll_dispatch(
            tokens, scales, handle.topk_idx, topk_weights, cast, scales_order, handle.number, group.number, send_only)
        is_scaled = scales is not None or cast is not None
        if not is_scaled:
            row_scales = None
        if topk_weights is None:
            ids = weights = None
        if send_only:
            handle.staged_outputs = _there(rows, row_scales, ids, weights, counts)
            handle.staged_inputs = _there(tokens, scales, topk_weights, handle.topk_idx)
        return result_class(True, ids is not None, is_scaled)(
            _given(rows, out), counts, ids, weights,
            scales=None if row_scales is None else _given(row_scales, out_scales))

    def combine(self, tokens: torch.Tensor, topk_weights: torch.Tensor | None = None, *,
                out: torch.Tensor | None = None, send_only: bool = False,
                stream: Any = None) -> torch.Tensor:
        """`EpHandle.combine`; what is given as `out` is copied to."""
        _check_stream(stream)
        group = self.handle.group
        if topk_weights is None and tokens.shape[:2] != (group.world_size, group.max_tokens_per_rank):
            raise ValueError("topk_weights: needed in low latency")
        _refuse_staged_output(send_only, out)
        sums = ll.ll_combine(tokens, self.handle.topk_idx, topk_weights, self.handle.number,
                             send_only)
        if send_only:
            self.handle.staged_outputs = [sums]
            self.handle.staged_inputs = _there(tokens, topk_weights, self.handle.topk_idx)
        return _given(sums, out)

    def combine_with_weights(self, tokens: torch.Tensor, topk_weights: torch.Tensor, *,
                             stream: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Refuses, as `EpHandle.combine_with_weights` does."""
        raise ValueError("combine_with_weights: for high throughput only")

    def complete(self, *, stream: Any = None) -> None:
        """`EpHandle.complete`."""
        _check_stream(stream)
        staged, self.handle.staged_outputs = self.handle.staged_outputs, []
        inputs, self.handle.staged_inputs = self.handle.staged_inputs, []
        if staged:
            ll.ll_complete(staged, inputs, self.handle.number)


class _Shadow:
    """A handle to a tracer: what that writes is here, all else the handle's."""

    def __init__(self, handle: Routed[Any]) -> None:
        self._handle = weakref.proxy(handle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def _written(handle: Routed[Any]) -> Any:
    """Where traced code writes what is the handle's: in a mode whose tensors have no memory to a shadow. Dynamo only
    notes what is written, for when its code runs."""
    if torch.compiler.is_dynamo_compiling():
        return handle
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None:
        return handle
    shadows = vars(mode).setdefault("nccl_ep_handles", {})
    if handle.number not in shadows:
        shadows[handle.number] = _Shadow(handle)
    return shadows[handle.number]


def traced(handle: EpHandle[Any]) -> TracedHandle | TracedLowLatency:
    """The handle in traced code."""
    seen = _written(handle)
    if handle.group.algorithm == "ll":
        return TracedLowLatency(seen)
    if handle.keeps_ids:
        return TracedHandle(handle.group, seen.topk_idx, seen.ticket, handle)
    return TracedHandle(handle.group, handle.topk_idx, ht.ht_ticket(handle.number))


def update(handle: Routed[Any], topk_idx: torch.Tensor, counts: torch.Tensor | None, stream: Any) -> None:
    """`EpHandle.update` in traced code."""
    _check_stream(stream)
    if not handle.keeps_ids:
        raise RuntimeError("update: code that is traced updates handles of high throughput that open_handle made; of "
                           "low latency it changes topk_idx in place")
    ids = topk_idx.to(torch.int64)
    ticket = ht.ht_update(ids, handle.number, handle.group.number)
    seen = _written(handle)
    seen.ticket, seen.topk_idx = ticket, ids
    seen.num_tokens, seen.top_k = ids.shape
    if counts is not None:
        counts.copy_(ticket)


def create_handle(group: EpGroup[Any], topk_idx: torch.Tensor, counts: torch.Tensor | None,
                  stream: Any) -> TracedHandle:
    """`EpGroup.create_handle` in traced code."""
    _check_stream(stream)
    if group.algorithm == "ll":
        raise RuntimeError("create_handle: compiled code makes no handles of low latency; make one "
                           "before, and change its topk_idx in place")
    ticket, counted = ht.ht_create_handle(topk_idx, group.number)
    if counts is not None:
        counts.copy_(counted)
    return TracedHandle(group, topk_idx, ticket)


def _check_stream(stream: Any) -> None:
    if stream is not None:
        raise ValueError("stream: must be None in code that is traced; it runs on the current one")


def _refuse_staged_output(send_only: bool, *outputs: torch.Tensor | None) -> None:
    """A staged operation writes later than a copy could be made."""
    if send_only and any(each is not None for each in outputs):
        raise ValueError("out: must be None in a staged operation that is traced")


def _there(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Without None."""
    return [each for each in tensors if each is not None]


def _given(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """`result`, in the memory that the caller gave."""
    return result if out is None else out.copy_(result)
