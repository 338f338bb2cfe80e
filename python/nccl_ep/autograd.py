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
from nccl_ep.routing import known_ids


def ht_dispatch(handle: EpHandle, tokens: torch.Tensor,
                topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sends `tokens` [T, H] and `topk_weights` float32 [T, K]; both get gradients.

    Returns tokens [n, H], topk_idx int64 [n, K] (local ids, ascending, then -1) and topk_weights
    float32 [n, K].
    """
    _require_ht(handle)
    received: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _apply(
        _Dispatch, handle, tokens, topk_weights)
    return received


def ht_combine(handle: EpHandle, tokens: torch.Tensor) -> torch.Tensor:
    """Sums the ranks' results `tokens` [n, H] for each token: [T, H]."""
    _require_ht(handle)
    home: torch.Tensor = _apply(_Combine, handle, tokens)
    return home


def dispatch(handle: EpHandle, tokens: torch.Tensor,
             topk_weights: torch.Tensor | None) -> DispatchResult:
    """`EpHandle.dispatch` of tensors that require gradients."""
    if topk_weights is None:
        return DispatchResult(_apply(_DispatchTokens, handle, tokens))
    rows, topk_idx, weights = ht_dispatch(handle, tokens, topk_weights)
    return WeightedResult(rows, None, topk_idx, weights)


def _apply(function: Any, *arguments: Any) -> Any:
    """`function.apply`, which torch does not type."""
    return function.apply(*arguments)


def _require_ht(handle: EpHandle) -> None:
    if not isinstance(handle, EpHandle):
        raise TypeError(f"handle: must be an EpHandle, not {type(handle).__name__}")
    if handle.group.algorithm != "ht":
        raise ValueError("handle: low latency has no gradients; its group must be \"ht\"")


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: EpHandle, tokens: torch.Tensor,
                topk_weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        received = handle.dispatch(tokens, topk_weights)
        ctx.handle = handle
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
        return None, home_tokens, in_callers_order(handle.topk_idx, home_weights,
                                                   handle.group.num_experts)


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
        out = torch.empty((ctx.rows, grad.shape[1]), dtype=grad.dtype, device=grad.device)
        with handle.group.backward_of("combine"):
            return None, handle.dispatch(grad, out=out).tokens


def in_callers_order(topk_idx: torch.Tensor, values: torch.Tensor,
                     num_experts: int) -> torch.Tensor:
    """Moves values [T, K], one for each expert of a token by ascending id, to the places of the ids
    in `topk_idx`.

    Ids without an expert get 0, those that a token repeats all the value of their expert: its
    weight is their sum.
    """
    keys, order = known_ids(topk_idx, num_experts).sort(dim=1)
    # How many other experts come before.
    column = torch.zeros_like(keys)
    column[:, 1:] = (keys[:, 1:] != keys[:, :-1]).cumsum(dim=1)
    in_order = torch.where(keys < num_experts, values.gather(1, column), 0.0)
    return torch.zeros_like(values).scatter_(1, order, in_order)
