"""Operators of high throughput: `torch.ops.nccl_ep.ht_*`.

A handle is one routing, which compiled code makes itself or gets from outside, and which backward
needs again: a ticket stands for it, a tensor that keeps it alive. Shapes: T tokens here, n rows
received, K top-k. `group` is `EpGroup.number`; `rows`, if given, is n. The gradient of a dispatch is a
combine and the other way round.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from nccl_ep.operators.define import define
from nccl_ep.operators.numbers import find, new_ticket, of_ticket, ticket as make_ticket
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


@define("ht_dispatch(Tensor tokens, Tensor topk_idx, Tensor ticket, int group, SymInt? rows, "
        "bool backward) -> Tensor")
def ht_dispatch(tokens: torch.Tensor, topk_idx: torch.Tensor, ticket: torch.Tensor, group: int,
                rows: int | None, backward: bool) -> torch.Tensor:
    """tokens [T, H] to rows [n, H]; `backward`: of a combine."""
    handle = _handle(ticket)
    with _noted(handle, "combine", backward):
        return handle.dispatch(tokens, out=_out(tokens, rows)).tokens


@ht_dispatch.register_fake
def _(tokens: torch.Tensor, topk_idx: torch.Tensor, ticket: torch.Tensor, group: int,
      rows: int | None, backward: bool) -> torch.Tensor:
    return tokens.new_empty((_received(group, rows), tokens.shape[1]))


@define("ht_dispatch_weighted(Tensor tokens, Tensor topk_weights, Tensor topk_idx, Tensor ticket, "
        "int group, SymInt? rows) -> (Tensor, Tensor, Tensor)")
def ht_dispatch_weighted(tokens: torch.Tensor, topk_weights: torch.Tensor, topk_idx: torch.Tensor,
                         ticket: torch.Tensor, group: int, rows: int | None) -> _Tensors:
    """tokens [T, H] and weights float32 [T, K] to rows [n, H], local ids int64 [n, K], weights."""
    received = _handle(ticket).dispatch(tokens, topk_weights, out=_out(tokens, rows))
    return received.tokens, received.topk_idx, received.topk_weights


@ht_dispatch_weighted.register_fake
def _(tokens: torch.Tensor, topk_weights: torch.Tensor, topk_idx: torch.Tensor,
      ticket: torch.Tensor, group: int, rows: int | None) -> _Tensors:
    count, top_k = _received(group, rows), topk_idx.shape[1]
    return (tokens.new_empty((count, tokens.shape[1])),
            tokens.new_empty((count, top_k), dtype=torch.int64),
            tokens.new_empty((count, top_k), dtype=torch.float32))


@define("ht_dispatch_scaled(Tensor tokens, Tensor? scales, Tensor? topk_weights, Tensor topk_idx, "
        "str? cast, str scales_order, Tensor ticket, int group, SymInt? rows) "
        "-> (Tensor, Tensor, Tensor, Tensor)")
def ht_dispatch_scaled(tokens: torch.Tensor, scales: torch.Tensor | None,
                       topk_weights: torch.Tensor | None, topk_idx: torch.Tensor, cast: Any,
                       scales_order: Any, ticket: torch.Tensor, group: int,
                       rows: int | None) -> _Tensors:
    """Rows with scales, or with a cast: rows, scales [n, S], ids and weights, both [0, K] without
    weights."""
    out = None
    if rows is not None:
        kind = scaled_rows(tokens, scales, cast).dtype
        out = tokens.new_empty((rows, tokens.shape[1]), dtype=kind)
    received = _handle(ticket).dispatch(tokens, topk_weights, scales=scales, cast=cast,
                                        scales_order=scales_order, out=out)
    assert received.scales is not None
    if received.topk_idx is None or received.topk_weights is None:
        none = (0, topk_idx.shape[1])
        return (received.tokens, received.scales, tokens.new_empty(none, dtype=torch.int64),
                tokens.new_empty(none, dtype=torch.float32))
    return received.tokens, received.scales, received.topk_idx, received.topk_weights


@ht_dispatch_scaled.register_fake
def _(tokens: torch.Tensor, scales: torch.Tensor | None, topk_weights: torch.Tensor | None,
      topk_idx: torch.Tensor, cast: Any, scales_order: Any, ticket: torch.Tensor, group: int,
      rows: int | None) -> _Tensors:
    count, made = _received(group, rows), scaled_rows(tokens, scales, cast)
    routing = (0 if topk_weights is None else count, topk_idx.shape[1])
    return (tokens.new_empty((count, tokens.shape[1]), dtype=made.dtype),
            new_scales((count, made.scales), made.scale_dtype, scales_order, tokens.device),
            tokens.new_empty(routing, dtype=torch.int64),
            tokens.new_empty(routing, dtype=torch.float32))


@define("ht_combine(Tensor rows, Tensor topk_idx, Tensor ticket, int group, bool backward) -> Tensor")
def ht_combine(rows: torch.Tensor, topk_idx: torch.Tensor, ticket: torch.Tensor, group: int,
               backward: bool) -> torch.Tensor:
    """rows [n, H] to sums [T, H]; `backward`: of a dispatch."""
    handle = _handle(ticket)
    with _noted(handle, "dispatch", backward):
        return handle.combine(rows)


@ht_combine.register_fake
def _(rows: torch.Tensor, topk_idx: torch.Tensor, ticket: torch.Tensor, group: int,
      backward: bool) -> torch.Tensor:
    return rows.new_empty((topk_idx.shape[0], rows.shape[1]))


@define("ht_combine_with_weights(Tensor rows, Tensor topk_weights, Tensor topk_idx, Tensor ticket, "
        "bool backward) -> (Tensor, Tensor)")
def ht_combine_with_weights(rows: torch.Tensor, topk_weights: torch.Tensor, topk_idx: torch.Tensor,
                            ticket: torch.Tensor, backward: bool) -> _Tensors:
    """rows [n, H] and weights [n, K] to sums [T, H] and weights [T, K], as
    `EpHandle.combine_with_weights`."""
    handle = _handle(ticket)
    with _noted(handle, "dispatch", backward):
        return handle.combine_with_weights(rows, topk_weights)


@ht_combine_with_weights.register_fake
def _(rows: torch.Tensor, topk_weights: torch.Tensor, topk_idx: torch.Tensor, ticket: torch.Tensor,
      backward: bool) -> _Tensors:
    return (rows.new_empty((topk_idx.shape[0], rows.shape[1])),
            rows.new_empty(tuple(topk_idx.shape), dtype=torch.float32))


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, topk_idx, ticket, ctx.group, _, _ = inputs
    ctx.save_for_backward(topk_idx, ticket)


def _dispatch_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    topk_idx, ticket = ctx.saved_tensors
    return ht_combine(grad, topk_idx, ticket, ctx.group, True), None, None, None, None, None


def _keep_weighted(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, topk_idx, ticket, ctx.group, _ = inputs
    ctx.save_for_backward(topk_idx, ticket)


def _weighted_backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    topk_idx, ticket = ctx.saved_tensors
    tokens, _, weights = grads
    if not ctx.needs_input_grad[1]:
        home = ht_combine(tokens, topk_idx, ticket, ctx.group, True)
        return home, None, None, None, None, None
    # autograd passes zeros for unused results, so every rank makes this call.
    home, by_expert = ht_combine_with_weights(tokens, weights, topk_idx, ticket, True)
    experts = find("group", ctx.group).num_experts
    return home, in_callers_order(topk_idx, by_expert, experts), None, None, None, None


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, topk_idx, ticket, ctx.group, _ = inputs
    ctx.rows = rows.shape[0]
    ctx.save_for_backward(topk_idx, ticket)


def _combine_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    topk_idx, ticket = ctx.saved_tensors
    return (ht_dispatch(grad, topk_idx, ticket, ctx.group, ctx.rows, True), None, None, None, None)


ht_dispatch.register_autograd(_dispatch_backward, setup_context=_keep_dispatch)
ht_dispatch_weighted.register_autograd(_weighted_backward, setup_context=_keep_weighted)
ht_combine.register_autograd(_combine_backward, setup_context=_keep_combine)


def _handle(ticket: torch.Tensor) -> EpHandle[Any]:
    handle: EpHandle[Any] = of_ticket("handle", ticket)
    return handle


def _noted(handle: EpHandle[Any], operation: str, backward: bool) -> AbstractContextManager[Any]:
    """Names the operation whose backward this is, in texts of failures."""
    return handle.group.backward_of(operation) if backward else contextlib.nullcontext()


def _out(tokens: torch.Tensor, rows: int | None) -> torch.Tensor | None:
    """Memory for so many rows as `tokens`."""
    return None if rows is None else tokens.new_empty((rows, tokens.shape[1]))


def _received(number: int, rows: int | None) -> int:
    """n while code is traced; a number that nobody knows yet if the group has no bound M."""
    if rows is not None:
        return rows
    group: EpGroup[Any] = find("group", number)
    if group.max_tokens_per_rank:
        return group.world_size * group.max_tokens_per_rank
    return unknown_size()


def unknown_size() -> int:
    """A size that is known when the code runs, in the fake of an operator."""
    size: int = torch.library.get_ctx().new_dynamic_size()
    return size
