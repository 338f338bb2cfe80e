"""High-throughput dispatch and combine as differentiable functions.

The gradient of a dispatch is a combine and the other way round, over the same handle. Backward is
as collective as forward: all ranks run it, and with the same tensors requiring gradients.
"""

from __future__ import annotations

from typing import Any

from nccl_ep.requirement import require_torch

require_torch("nccl_ep.autograd")

import torch

from nccl_ep.gradients import apply, check_routing, needs_gradient, rows_in_graph
from nccl_ep.handle import EpHandle
from nccl_ep.results import DispatchResult, WeightedResult
from nccl_ep.operators.traced import TracedHandle, is_traced
from nccl_ep.routing import in_callers_order


def ht_dispatch(handle: EpHandle, tokens: torch.Tensor,
                topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sends `tokens` [T, H] and `topk_weights` float32 [T, K]; both get gradients.

    Returns tokens [n, H], topk_idx int64 [n, K] (local ids, ascending, then -1) and topk_weights
    float32 [n, K]; where rows lie by expert tokens [P, H], None and topk_weights [P].
    """
    _require_ht(handle)
    if is_traced() or isinstance(handle, TracedHandle):
        of_trace = handle.dispatch(tokens, topk_weights)
        return of_trace.tokens, of_trace.topk_idx, of_trace.topk_weights
    received: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = apply(
        _Dispatch, handle, tokens, topk_weights)
    return received


def ht_combine(handle: EpHandle, tokens: torch.Tensor) -> torch.Tensor:
    """Sums the ranks' results `tokens` [n, H] for each token: [T, H]."""
    _require_ht(handle)
    if is_traced() or isinstance(handle, TracedHandle):
        return handle.combine(tokens)
    home: torch.Tensor = apply(_Combine, handle, tokens)
    return home


def dispatch(handle: EpHandle, tokens: torch.Tensor,
             topk_weights: torch.Tensor | None) -> DispatchResult:
    """`EpHandle.dispatch` of tensors that require gradients."""
    if topk_weights is None:
        return DispatchResult(apply(_DispatchTokens, handle, tokens, None))
    rows, topk_idx, weights = ht_dispatch(handle, tokens, topk_weights)
    return (DispatchResult if handle.expert_alignment else WeightedResult)(rows, None, topk_idx, weights)


def _require_ht(handle: EpHandle) -> None:
    if not isinstance(handle, (EpHandle, TracedHandle)):
        raise TypeError(f"handle: must be an EpHandle, not {type(handle).__name__}")
    if handle.group.algorithm != "ht":
        raise ValueError("handle: low latency has no gradients; its group must be \"ht\"")


def _combine_weighted(handle: EpHandle, rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums [T, H], and weights [T, K] at the places of their ids: what a dispatch of both does, the other way round."""
    if needs_gradient(rows, weights):
        home: tuple[torch.Tensor, torch.Tensor] = apply(_CombineWeighted, handle, rows, weights)
        return home
    sums, home_weights = handle.combine_with_weights(rows, weights)
    if not handle.keeps_ids:
        home_weights = in_callers_order(handle.topk_idx, home_weights, handle.group.num_experts)
    return sums, home_weights


class _Operation(torch.autograd.Function):
    """Of a handle and tensors. Each is linear; its gradient is another, which has gradients in turn."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        """An operation for each element of a batch; so all ranks need batches of one size."""
        results = [apply(cls, *(each if dim is None else each.select(dim, element)
                                 for each, dim in zip(arguments, in_dims, strict=True)))
                   for element in range(info.batch_size)]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        stacked = tuple(None if each[0] is None else torch.stack(each) for each in zip(*results, strict=True))
        return stacked, tuple(None if each is None else 0 for each in stacked)

    @classmethod
    def jvp(cls, ctx: Any, *tangents: torch.Tensor | None) -> Any:
        """Forward mode: the operation on the tangents, which are zeros where there are none."""
        results = apply(cls, _Operation.handle_of(ctx), *(
            other if tangent is None else tangent for tangent, other in zip(tangents[1:], ctx.others, strict=True)))
        if isinstance(results, torch.Tensor):
            return results
        return tuple(each if each is not None and each.is_floating_point() else None for each in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Remembers what every backward needs, and forward mode."""
        ctx.handle = inputs[0]
        ctx.routing = ctx.handle.routing
        ctx.others = [None if isinstance(each, torch.Tensor) else each for each in inputs[1:]]

    @staticmethod
    def handle_of(ctx: Any) -> EpHandle:
        """The handle of a backward."""
        handle: EpHandle = ctx.handle
        check_routing(handle, ctx.routing)
        return handle


class _Dispatch(_Operation):
    @staticmethod
    def forward(handle: EpHandle, tokens: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        received = handle.dispatch(tokens, topk_weights, out=rows_in_graph(handle, tokens, None))
        return received.tokens, received.topk_idx, received.topk_weights

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _Operation.setup_context(ctx, inputs, output)
        if output[1] is not None:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        tokens, _, weights = grads
        handle = _Operation.handle_of(ctx)
        with handle.group.backward_of("dispatch"):
            if not ctx.needs_input_grad[2]:
                return None, handle.combine(tokens), None
            # autograd passes zeros for unused results, so every rank makes this call.
            return None, *_combine_weighted(handle, tokens, weights)


class _DispatchTokens(_Operation):
    @staticmethod
    def forward(handle: EpHandle, tokens: torch.Tensor, rows: int | None) -> torch.Tensor:
        return handle.dispatch(tokens, out=rows_in_graph(handle, tokens, rows)).tokens

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        handle = _Operation.handle_of(ctx)
        with handle.group.backward_of("dispatch"):
            return None, handle.combine(grads[0]), None


class _Combine(_Operation):
    @staticmethod
    def forward(handle: EpHandle, tokens: torch.Tensor) -> torch.Tensor:
        return handle.combine(tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _Operation.setup_context(ctx, inputs, output)
        ctx.rows = inputs[1].shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        handle = _Operation.handle_of(ctx)
        with handle.group.backward_of("combine"):
            dispatch = _DispatchTokens.apply if needs_gradient(grads[0], None) else _DispatchTokens.forward
            return None, dispatch(handle, grads[0], ctx.rows)


class _CombineWeighted(_Operation):
    @staticmethod
    def forward(handle: EpHandle, rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _combine_weighted(handle, rows, weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        handle = _Operation.handle_of(ctx)
        with handle.group.backward_of("combine_with_weights"):
            rows, _, weights = apply(_Dispatch, handle, *grads)
        return None, rows, weights
