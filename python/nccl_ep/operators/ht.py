"""Operators of high throughput: `torch.ops.nccl_ep.ht_*`.

A handle is one routing, which compiled code makes itself or gets from outside, and which backward needs again: a
ticket stands for it, a tensor on the CPU that keeps it alive. A handle of `EpGroup.open_handle` outlives the code, so
its number stands for it, `handle`, and its ticket, on the device, is what operators wait for; of others `handle` is 0.
Shapes: T tokens here, n rows received, K top-k. `group` is `EpGroup.number`; `rows`, if given, is n. The gradient of a
dispatch is a combine and the other way round.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from nccl_ep.gradients import check_routing, rows_in_graph
from nccl_ep.operators.define import define
from nccl_ep.operators.numbers import find, new_ticket, of_ticket, ticket as make_ticket
from nccl_ep.results import DispatchResult
from nccl_ep.routing import in_callers_order
from nccl_ep.scales import new_scales, scaled_rows

if TYPE_CHECKING:
    from nccl_ep.group import EpGroup
    from nccl_ep.handle import EpHandle

_Tensors = tuple[torch.Tensor, ...]


@define("ht_create_handle(Tensor topk_idx, int group) -> (Tensor, Tensor)")
def ht_create_handle(topk_idx: torch.Tensor, group: int) -> _Tensors:
    """topk_idx [T, K] to a ticket and counts int32 [L]; collective."""
    ep: EpGroup[Any] = find("group", group)
    counts = topk_idx.new_empty((ep.num_local_experts,), dtype=torch.int32)
    handle = ep.create_handle(topk_idx, counts=counts)
    return make_ticket(handle, handle.number), counts


@ht_create_handle.register_fake
def _(topk_idx: torch.Tensor, group: int) -> _Tensors:
    local = find("group", group).num_local_experts
    return new_ticket(), topk_idx.new_empty((local,), dtype=torch.int32)


@define("ht_ticket(SymInt handle) -> Tensor")
def ht_ticket(handle: int) -> torch.Tensor:
    """A ticket of the handle with this number."""
    return make_ticket(find("handle", handle), handle)


@ht_ticket.register_fake
def _(handle: int) -> torch.Tensor:
    return new_ticket()


@define("ht_update(Tensor topk_idx, SymInt handle, int group) -> Tensor")
def ht_update(topk_idx: torch.Tensor, handle: int, group: int) -> torch.Tensor:
    """topk_idx [T, K] to counts int32 [L], the ticket of the new routing; collective."""
    counts = topk_idx.new_empty((find("group", group).num_local_experts,), dtype=torch.int32)
    find("handle", handle).update(topk_idx, counts=counts)
    return counts


@ht_update.register_fake
def _(topk_idx: torch.Tensor, handle: int, group: int) -> torch.Tensor:
    return topk_idx.new_empty((find("group", group).num_local_experts,), dtype=torch.int32)


@define("ht_dispatch(Tensor tokens, Tensor topk_idx, Tensor ticket, SymInt handle, int group, SymInt? rows, "
        "bool backward) -> Tensor")
def ht_dispatch(tokens: torch.Tensor, topk_idx: torch.Tensor, ticket: torch.Tensor, handle: int, group: int,
                rows: int | None, backward: bool) -> torch.Tensor:
    """tokens [T, H] to rows [n, H]; `backward`: of a combine."""
    routed = _handle(ticket, handle)
    with _noted(routed, "combine", backward):
        return routed.dispatch(tokens, out=_out(tokens, rows, routed)).tokens


@ht_dispatch.register_fake
def _(tokens: torch.Tensor, topk_idx: torch.Tensor, ticket: torch.Tensor, handle: int, group: int,
      rows: int | None, backward: bool) -> torch.Tensor:
    return tokens.new_empty((_received(group, rows, handle, topk_idx), tokens.shape[1]))


@define("ht_dispatch_weighted(Tensor tokens, Tensor topk_weights, Tensor topk_idx, Tensor ticket, SymInt handle, "
        "int group, SymInt? rows) -> (Tensor, Tensor, Tensor)")
def ht_dispatch_weighted(tokens: torch.Tensor, topk_weights: torch.Tensor, topk_idx: torch.Tensor,
                         ticket: torch.Tensor, handle: int, group: int, rows: int | None) -> _Tensors:
    """tokens [T, H] and weights float32 [T, K] to rows [n, H], local ids int64 [n, K], weights; where rows lie by
    expert ids [0, K] and weights [n]."""
    routed = _handle(ticket, handle)
    received = routed.dispatch(tokens, topk_weights, out=_out(tokens, rows, routed))
    return received.tokens, _ids(received, topk_idx), received.topk_weights


@ht_dispatch_weighted.register_fake
def _(tokens: torch.Tensor, topk_weights: torch.Tensor, topk_idx: torch.Tensor,
      ticket: torch.Tensor, handle: int, group: int, rows: int | None) -> _Tensors:
    count = _received(group, rows, handle, topk_idx)
    return tokens.new_empty((count, tokens.shape[1])), *_fake_routing(handle, count, topk_idx, True)


@define("ht_dispatch_scaled(Tensor tokens, Tensor? scales, Tensor? topk_weights, Tensor topk_idx, "
        "str? cast, str scales_order, Tensor ticket, SymInt handle, int group, SymInt? rows) "
        "-> (Tensor, Tensor, Tensor, Tensor)")
def ht_dispatch_scaled(tokens: torch.Tensor, scales: torch.Tensor | None, topk_weights: torch.Tensor | None,
                       topk_idx: torch.Tensor, cast: Any, scales_order: Any, ticket: torch.Tensor, handle: int,
                       group: int, rows: int | None) -> _Tensors:
    """Rows with scales, or with a cast: rows, scales [n, S], ids and weights, both [0, K] without
    weights."""
    routed, made = _handle(ticket, handle), scaled_rows(tokens, scales, cast)
    out_scales = None
    if rows is not None and routed.expert_alignment:
        out_scales = new_scales((rows, made.scales), made.scale_dtype, scales_order, tokens.device, True)
    received = routed.dispatch(tokens, topk_weights, scales=scales, cast=cast, scales_order=scales_order,
                               out=_out(tokens, rows, routed, made.dtype), out_scales=out_scales)
    assert received.scales is not None
    weights = received.topk_weights
    if weights is None:
        weights = tokens.new_empty((0, topk_idx.shape[1]), dtype=torch.float32)
    return received.tokens, received.scales, _ids(received, topk_idx), weights


@ht_dispatch_scaled.register_fake
def _(tokens: torch.Tensor, scales: torch.Tensor | None, topk_weights: torch.Tensor | None,
      topk_idx: torch.Tensor, cast: Any, scales_order: Any, ticket: torch.Tensor, handle: int, group: int,
      rows: int | None) -> _Tensors:
    count, made = _received(group, rows, handle, topk_idx), scaled_rows(tokens, scales, cast)
    return (tokens.new_empty((count, tokens.shape[1]), dtype=made.dtype),
            new_scales((count, made.scales), made.scale_dtype, scales_order, tokens.device),
            *_fake_routing(handle, count, topk_idx, topk_weights is not None))


@define("ht_combine(Tensor rows, Tensor topk_idx, Tensor ticket, SymInt handle, int group, bool backward) -> Tensor")
def ht_combine(rows: torch.Tensor, topk_idx: torch.Tensor, ticket: torch.Tensor, handle: int, group: int,
               backward: bool) -> torch.Tensor:
    """rows [n, H] to sums [T, H]; `backward`: of a dispatch."""
    routed = _handle(ticket, handle)
    with _noted(routed, "dispatch", backward):
        return routed.combine(rows)


@ht_combine.register_fake
def _(rows: torch.Tensor, topk_idx: torch.Tensor, ticket: torch.Tensor, handle: int, group: int,
      backward: bool) -> torch.Tensor:
    return rows.new_empty((topk_idx.shape[0], rows.shape[1]))


@define("ht_combine_with_weights(Tensor rows, Tensor topk_weights, Tensor topk_idx, Tensor ticket, SymInt handle, "
        "bool backward) -> (Tensor, Tensor)")
def ht_combine_with_weights(rows: torch.Tensor, topk_weights: torch.Tensor, topk_idx: torch.Tensor,
                            ticket: torch.Tensor, handle: int, backward: bool) -> _Tensors:
    """rows [n, H] and weights [n, K] to sums [T, H] and weights [T, K], as
    `EpHandle.combine_with_weights`."""
    routed = _handle(ticket, handle)
    with _noted(routed, "dispatch", backward):
        return routed.combine_with_weights(rows, topk_weights)


@ht_combine_with_weights.register_fake
def _(rows: torch.Tensor, topk_weights: torch.Tensor, topk_idx: torch.Tensor, ticket: torch.Tensor, handle: int,
      backward: bool) -> _Tensors:
    return (rows.new_empty((topk_idx.shape[0], rows.shape[1])),
            rows.new_empty(tuple(topk_idx.shape), dtype=torch.float32))


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _keep_routing(ctx, inputs[1:5])


def _dispatch_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return ht_combine(grad, *_routing(ctx), True), *[None] * 6


def _keep_weighted(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _keep_routing(ctx, inputs[2:6])


def _weighted_backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    tokens, _, weights = grads
    topk_idx, ticket, handle, group = _routing(ctx)
    if not ctx.needs_input_grad[1]:
        return ht_combine(tokens, topk_idx, ticket, handle, group, True), *[None] * 6
    # autograd passes zeros for unused results, so every rank makes this call.
    home, home_weights = ht_combine_with_weights(tokens, weights, topk_idx, ticket, handle, True)
    if not handle:
        home_weights = in_callers_order(topk_idx, home_weights, find("group", group).num_experts)
    return home, home_weights, *[None] * 5


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.rows = inputs[0].shape[0]
    _keep_routing(ctx, inputs[1:5])


def _combine_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return ht_dispatch(grad, *_routing(ctx), ctx.rows, True), *[None] * 5


ht_dispatch.register_autograd(_dispatch_backward, setup_context=_keep_dispatch)
ht_dispatch_weighted.register_autograd(_weighted_backward, setup_context=_keep_weighted)
ht_combine.register_autograd(_combine_backward, setup_context=_keep_combine)


def _keep_routing(ctx: Any, routing: tuple[Any, ...]) -> None:
    """Ids, ticket, handle and group; how many routings the handle has had, if it is no tracer that asks."""
    topk_idx, ticket, ctx.handle, ctx.group = routing
    ctx.routing = find("handle", ctx.handle).routing if type(ticket) is torch.Tensor and ctx.handle else None
    ctx.kept = ticket  # hooks may save a copy, which keeps no handle
    ctx.save_for_backward(topk_idx, ticket)


def _routing(ctx: Any) -> tuple[Any, ...]:
    if ctx.routing is not None:
        check_routing(find("handle", ctx.handle), ctx.routing)
    return *ctx.saved_tensors, ctx.handle, ctx.group


def _handle(ticket: torch.Tensor, number: int) -> EpHandle[Any]:
    handle: EpHandle[Any] = find("handle", number) if number else of_ticket("handle", ticket)
    return handle


def _noted(handle: EpHandle[Any], operation: str, backward: bool) -> AbstractContextManager[Any]:
    """Names the operation whose backward this is, in texts of failures."""
    return handle.group.backward_of(operation) if backward else contextlib.nullcontext()


def _out(tokens: torch.Tensor, rows: int | None, handle: EpHandle[Any],
         dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """Memory for `rows`, if that is given."""
    return None if rows is None else rows_in_graph(handle, tokens, rows, dtype)


def _ids(received: DispatchResult, topk_idx: torch.Tensor) -> torch.Tensor:
    """Received ids, or [0, K] where there are none."""
    if received.topk_idx is None:
        return topk_idx.new_empty((0, topk_idx.shape[1]), dtype=torch.int64)
    return received.topk_idx


def _fake_routing(handle: int, rows: int, topk_idx: torch.Tensor, weighted: bool) -> _Tensors:
    """Ids and weights that are received."""
    top_k, by_expert = topk_idx.shape[1], handle and find("handle", handle).expert_alignment
    weights = (rows,) if weighted and by_expert else (rows if weighted else 0, top_k)
    return (topk_idx.new_empty((rows if weighted and not by_expert else 0, top_k), dtype=torch.int64),
            topk_idx.new_empty(weights, dtype=torch.float32))


def _received(number: int, rows: int | None, handle: int, topk_idx: torch.Tensor) -> int:
    """n while code is traced; a number that nobody knows yet if the group has no bound M."""
    if rows is not None:
        return rows
    group: EpGroup[Any] = find("group", number)
    if not group.max_tokens_per_rank:
        return unknown_size()
    if not handle:
        return group.most_rows(topk_idx.shape[1])
    opened = find("handle", handle)
    return group.most_rows(topk_idx.shape[1], opened.expert_alignment, opened.max_rows)


def unknown_size() -> int:
    """A size that is known when the code runs, in the fake of an operator."""
    size: int = torch.library.get_ctx().new_dynamic_size()
    return size
