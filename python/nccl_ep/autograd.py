"""High-throughput dispatch and combine as differentiable functions.

The gradient of a dispatch is a combine and the other way round, over the same handle. Backward is
as collective as forward: all ranks run it, and with the same tensors requiring gradients.
"""

from __future__ import annotations

from typing import Any

from nccl_ep.requirement import require_torch

require_torch("nccl_ep.autograd")

import torch
from torch.autograd.function import once_differentiable

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
    received: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _apply(
        _Dispatch, handle, tokens, topk_weights)
    return received


def ht_combine(handle: EpHandle, tokens: torch.Tensor) -> torch.Tensor:
    """Sums the ranks' results `tokens` [n, H] for each token: [T, H]."""
    _require_ht(handle)
    if is_traced() or isinstance(handle, TracedHandle):
        return handle.combine(tokens)
    home: torch.Tensor = _apply(_Combine, handle, tokens)
    return home


def dispatch(handle: EpHandle, tokens: torch.Tensor,
             topk_weights: torch.Tensor | None) -> DispatchResult:
    """`EpHandle.dispatch` of tensors that require gradients."""
    if topk_weights is None:
        return DispatchResult(_apply(_DispatchTokens, handle, tokens))
    rows, topk_idx, weights = ht_dispatch(handle, tokens, topk_weights)
    return (DispatchResult if handle.expert_alignment else WeightedResult)(rows, None, topk_idx, weights)


def _apply(function: Any, *arguments: Any) -> Any:
    """`function.apply`, which torch does not type."""
    return function.apply(*arguments)


def _require_ht(handle: EpHandle) -> None:
    if not isinstance(handle, (EpHandle, TracedHandle)):
        raise TypeError(f"handle: must be an EpHandle, not {type(handle).__name__}")
    if handle.group.algorithm != "ht":
        raise ValueError("handle: low latency has no gradients; its group must be \"ht\"")


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: EpHandle, tokens: torch.Tensor,
                topk_weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        received = handle.dispatch(tokens, topk_weights)
        ctx.handle = handle
        if received.topk_idx is not None:
            ctx.mark_non_differentiable(received.topk_idx)
        return received.tokens, received.topk_idx, received.topk_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        tokens, _, weights = grads
        handle: EpHandle = ctx.handle
        with handle.group.backward_of("dispatch"):
            if not ctx.needs_input_grad[2]:
                return None, handle.combine(tokens), None
            # autograd passes zeros for unused results, so every rank makes this call.
            home_tokens, home_weights = handle.combine_with_weights(tokens, weights)
        if not handle.keeps_ids:
            home_weights = in_callers_order(handle.topk_idx, home_weights, handle.group.num_experts)
        return None, home_tokens, home_weights


class _DispatchTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: EpHandle, tokens: torch.Tensor) -> torch.Tensor:
        ctx.handle = handle
        return handle.dispatch(tokens).tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        handle: EpHandle = ctx.handle
        with handle.group.backward_of("dispatch"):
            return None, handle.combine(grads[0])


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: EpHandle, tokens: torch.Tensor) -> torch.Tensor:
        home = handle.combine(tokens)
        ctx.handle = handle
        ctx.rows = tokens.shape[0]
        return home

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        [grad] = grads
        handle: EpHandle = ctx.handle
        # Behind the rows of all experts nothing is written.
        new = torch.zeros if handle.expert_alignment else torch.empty
        out = new((ctx.rows, grad.shape[1]), dtype=grad.dtype, device=grad.device)
        with handle.group.backward_of("combine"):
            return None, handle.dispatch(grad, out=out).tokens
