"""`EPAll2AllLayer` as operators: `torch.ops.nccl_ep.layer_*`, for code that is traced.

A ticket, a tensor, keeps the layout of a dispatch for its combine and for backward. Shapes: T tokens
here, P rows of this rank's experts, which nobody knows before the code runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nccl_ep.layers.layout import EPAllToAllLayoutDesc
from nccl_ep.layers.rows import add_up, spread
from nccl_ep.layers.scaled import Scaling
from nccl_ep.operators.define import define
from nccl_ep.operators.ht import unknown_size
from nccl_ep.operators.numbers import find, new_ticket, of_ticket, register_for_life, ticket as make
from nccl_ep.routing import in_callers_order
from nccl_ep.runtime import kept
from nccl_ep.scales import new_scales, scaled_rows

if TYPE_CHECKING:
    from nccl_ep.layers.ep_a2a import EPAll2AllLayer

_Tensors = tuple[torch.Tensor, ...]


@define("layer_dispatch(Tensor input, Tensor topk_idx, Tensor? weight, int layer, bool latency) "
        "-> (Tensor, Tensor, Tensor, Tensor)")
def layer_dispatch(input: torch.Tensor, topk_idx: torch.Tensor, weight: torch.Tensor | None,
                   layer: int, latency: bool) -> _Tensors:
    """input [T, H], ids and weights [T, K] to rows [P, H], weights [P] ([0] without), counts int32
    [L], ticket."""
    rows, weights, layout = _dispatch(layer, latency, input, topk_idx, weight,
                                      Scaling(None, None, "row"))
    return rows, *_rest(rows, weights, layout)


@layer_dispatch.register_fake
def _(input: torch.Tensor, topk_idx: torch.Tensor, weight: torch.Tensor | None, layer: int,
      latency: bool) -> _Tensors:
    of_layer: EPAll2AllLayer = find("layer", layer)
    count = _rows(of_layer, latency)
    return input.new_empty((count, input.shape[1])), *_fake_rest(input, weight, of_layer, count)


@define("layer_dispatch_scaled(Tensor input, Tensor? scales, Tensor topk_idx, Tensor? weight, "
        "str? cast, str scales_order, int layer, bool latency) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def layer_dispatch_scaled(input: torch.Tensor, scales: torch.Tensor | None, topk_idx: torch.Tensor,
                          weight: torch.Tensor | None, cast: Any, scales_order: Any, layer: int,
                          latency: bool) -> _Tensors:
    """The same of rows with scales, or with a cast: rows, scales, weights, counts, ticket."""
    rows, weights, layout = _dispatch(layer, latency, input, topk_idx, weight,
                                      Scaling(scales, cast, scales_order))
    return rows, layout.scales, *_rest(rows, weights, layout)


@layer_dispatch_scaled.register_fake
def _(input: torch.Tensor, scales: torch.Tensor | None, topk_idx: torch.Tensor,
      weight: torch.Tensor | None, cast: Any, scales_order: Any, layer: int,
      latency: bool) -> _Tensors:
    of_layer: EPAll2AllLayer = find("layer", layer)
    made, count = scaled_rows(input, scales, cast), _rows(of_layer, latency)
    blocks = ((of_layer.num_experts_per_rank, count // of_layer.num_experts_per_rank) if latency
              else (count,))
    row_scales = new_scales((*blocks, made.scales), made.scale_dtype, scales_order, input.device)
    if latency and scales_order == "row":
        row_scales = row_scales.flatten(0, 1)
    return (input.new_empty((count, input.shape[1]), dtype=made.dtype), row_scales,
            *_fake_rest(input, weight, of_layer, count))


@define("layer_combine(Tensor rows, Tensor topk_idx, Tensor ticket, int layer) -> Tensor")
def layer_combine(rows: torch.Tensor, topk_idx: torch.Tensor, ticket: torch.Tensor,
                  layer: int) -> torch.Tensor:
    """rows [P, H] to sums [T, H]."""
    return find("layer", layer).combine(rows, _layout(ticket))


@layer_combine.register_fake
def _(rows: torch.Tensor, topk_idx: torch.Tensor, ticket: torch.Tensor, layer: int) -> torch.Tensor:
    dtype = find("layer", layer).ep_config.token_dtype
    return rows.new_empty((topk_idx.shape[0], rows.shape[1]), dtype=dtype)


@define("layer_dispatch_backward(Tensor rows, Tensor? weights, Tensor topk_idx, Tensor ticket) "
        "-> (Tensor, Tensor)")
def layer_dispatch_backward(rows: torch.Tensor, weights: torch.Tensor | None,
                            topk_idx: torch.Tensor, ticket: torch.Tensor) -> _Tensors:
    """Gradients of rows [P, H] and their weights [P] to those of tokens [T, H] and weights float32
    [T, K] ([0] without)."""
    layout = _layout(ticket)
    handle, expansion = layout.handle, layout.expansion
    assert handle is not None and expansion is not None
    sums = add_up(rows.contiguous(), expansion)
    with handle.group.backward_of("dispatch"):
        if weights is None:
            return handle.combine(sums), rows.new_empty(0, dtype=torch.float32)
        received, columns = expansion.slots.shape
        pairs = rows.new_zeros(received * columns, dtype=torch.float32)
        pairs[kept(expansion.pair)] = weights.to(torch.float32)
        grads = rows.new_zeros((received, handle.top_k), dtype=torch.float32)
        grads[:, :columns] = pairs.view(received, columns)
        home, by_expert = handle.combine_with_weights(sums, grads)
    return home, in_callers_order(topk_idx, by_expert, handle.group.num_experts)


@layer_dispatch_backward.register_fake
def _(rows: torch.Tensor, weights: torch.Tensor | None, topk_idx: torch.Tensor,
      ticket: torch.Tensor) -> _Tensors:
    shape = (0,) if weights is None else tuple(topk_idx.shape)
    return (rows.new_empty((topk_idx.shape[0], rows.shape[1])),
            rows.new_empty(shape, dtype=torch.float32))


@define("layer_combine_backward(Tensor grad, Tensor ticket, SymInt rows, ScalarType dtype) "
        "-> Tensor")
def layer_combine_backward(grad: torch.Tensor, ticket: torch.Tensor, rows: int,
                           dtype: torch.dtype) -> torch.Tensor:
    """The gradient of sums [T, H] to that of rows [P, H]."""
    layout = _layout(ticket)
    handle, expansion = layout.handle, layout.expansion
    assert handle is not None and expansion is not None
    out = grad.new_empty((expansion.slots.shape[0], grad.shape[1]))
    with handle.group.backward_of("combine"):
        received = handle.dispatch(grad, out=out).tokens
    return spread(received.to(dtype), expansion)


@layer_combine_backward.register_fake
def _(grad: torch.Tensor, ticket: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return grad.new_empty((rows, grad.shape[1]), dtype=dtype)


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: _Tensors) -> None:
    _, topk_idx, weight, _, _ = inputs
    ctx.weight_dtype = None if weight is None else weight.dtype
    ctx.kept = output[3]  # hooks may save a copy, which keeps no layout
    ctx.save_for_backward(topk_idx, output[3])


def _dispatch_backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    topk_idx, ticket = ctx.saved_tensors
    needed = ctx.weight_dtype is not None and ctx.needs_input_grad[2]
    tokens, weights = layer_dispatch_backward(grads[0], grads[1] if needed else None, topk_idx,
                                              ticket)
    return tokens, None, weights.to(ctx.weight_dtype) if needed else None, None, None


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, _, ticket, _ = inputs
    ctx.rows, ctx.dtype = rows.shape[0], rows.dtype
    ctx.kept = ticket
    ctx.save_for_backward(ticket)


def _combine_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    [ticket] = ctx.saved_tensors
    return layer_combine_backward(grad, ticket, ctx.rows, ctx.dtype), None, None, None


layer_dispatch.register_autograd(_dispatch_backward, setup_context=_keep_dispatch)
layer_combine.register_autograd(_combine_backward, setup_context=_keep_combine)


def _dispatch(number: int, latency: bool, *arguments: Any) -> Any:
    """The dispatch of the layer, by the mode that was decided when it was traced."""
    layer: EPAll2AllLayer = find("layer", number)
    return (layer.dispatch_small if latency else layer.dispatch_large)(*arguments)


def _rest(rows: torch.Tensor, weights: torch.Tensor | None,
          layout: EPAllToAllLayoutDesc) -> _Tensors:
    """Weights, counts and ticket of a dispatch."""
    return (rows.new_empty(0, dtype=torch.float32) if weights is None else weights,
            layout.num_recv_tokens_per_expert, make(layout, register_for_life(layout)))


def _fake_rest(input: torch.Tensor, weight: torch.Tensor | None, layer: EPAll2AllLayer,
               count: int) -> _Tensors:
    weights = (input.new_empty((0,), dtype=torch.float32) if weight is None else
               input.new_empty((count,), dtype=layer.ep_config.weight_dtype))
    counts = input.new_empty((layer.num_experts_per_rank,), dtype=torch.int32)
    return weights, counts, new_ticket()


def _rows(layer: EPAll2AllLayer, latency: bool) -> int:
    """P while code is traced."""
    return layer.latency_rows if latency else unknown_size()


def _layout(ticket: torch.Tensor) -> EPAllToAllLayoutDesc:
    layout: EPAllToAllLayoutDesc = of_ticket("layout", ticket)
    return layout
