"""From received tokens to rows sorted by expert, and back.

A rank receives a token once, even if several of its experts get it. Experts need one row per
(token, expert) pair; results return as one row per token, summed in fp32.
Nothing here waits for the GPU, unless positions are given.
"""

from __future__ import annotations

from typing import Any

import torch

from nccl_ep.gradients import apply, needs_gradient
from nccl_ep.results import DispatchResult
from nccl_ep.layers.layout import Expansion
from nccl_ep.layers.rows import add_up, spread
from nccl_ep.routing import stable_sort
from nccl_ep.scales import new_scales

# Types of as many bytes as a scale, whose rows torch selects on every device.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def by_expert(topk_idx: torch.Tensor, num_rows: int, num_local_experts: int,
              positions: torch.Tensor | None = None) -> Expansion:
    """The expansion of received tokens with local ids `topk_idx` [n, K] into `num_rows` rows.

    Rows are sorted by expert, then in the order of the received tokens; or `positions` [n, K]
    gives the row of each pair. Ids ascend; -1, no expert, follows.
    """
    # A token has at most as many experts here as this rank hosts.
    ids = expert_columns(topk_idx, num_local_experts)
    # Entries without an expert go last: -1 becomes L.
    experts, places = stable_sort(ids.remainder(num_local_experts + 1).flatten(), num_local_experts)
    pair = places[:num_rows]
    if positions is not None:
        rows = expert_columns(positions, num_local_experts).flatten()[pair]
        _check_positions(rows, experts[:num_rows].to(torch.int64))
        pair = torch.empty_like(pair).scatter_(0, rows, pair)
    number = torch.arange(num_rows, dtype=torch.int32, device=ids.device)
    slots = torch.full((ids.numel(),), -1, dtype=torch.int32, device=ids.device)
    return Expansion(pair, slots.scatter_(0, pair, number).view(ids.shape))


def expert_columns(values: torch.Tensor, most: int) -> torch.Tensor:
    """Those of [n, K] that may have an expert, if so many are here."""
    return values[:, :min(values.shape[1], most)]


def _check_positions(rows: torch.Tensor, experts: torch.Tensor) -> None:
    """Checks that `rows` are all of 0..P-1 and keep `experts`, which ascend, in their order."""
    inside = rows.clamp(0, max(rows.numel() - 1, 0))
    # A row that nobody takes stays -1.
    placed = torch.full_like(experts, -1).scatter_(0, inside, experts)
    if not bool(((rows == inside) & (placed == experts)).all()):
        raise ValueError("full_scatter_indices: no order of rows by expert for this routing")


def expand(tokens: torch.Tensor, expansion: Expansion) -> torch.Tensor:
    """A row for each pair: [n, H] to [P, H]. Differentiable."""
    if not needs_gradient(tokens, None):
        return spread(tokens, expansion)
    rows: torch.Tensor = apply(_Expand, tokens, expansion)
    return rows


def received_rows(received: DispatchResult, expansion: Expansion,
                  order: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A row for each pair, and its scales in this `scales_order` if tokens have scales."""
    if received.scales is None:
        return expand(received.tokens, expansion), None
    # Rows are a multiple of 16 bytes. They are only moved, so they go as float32, for which the
    # kernel is built.
    rows = spread(received.tokens.view(torch.float32), expansion).view(received.tokens.dtype)
    return rows, _scales_of_rows(received.scales, expansion, order)


def _scales_of_rows(scales: torch.Tensor, expansion: Expansion, order: str) -> torch.Tensor:
    """The scales of each pair: [n, S] to [P, S]."""
    rows = new_scales((expansion.num_rows, scales.shape[1]), scales.dtype, order, scales.device)
    bits = _BITS[scales.dtype.itemsize]
    torch.index_select(scales.view(bits), 0, expansion.source, out=rows.view(bits))
    return rows


def weight_of_row(topk_weights: torch.Tensor, expansion: Expansion,
                  num_local_experts: int) -> torch.Tensor:
    """The weight of each pair: [n, K] to [P]. Differentiable."""
    return expert_columns(topk_weights, num_local_experts).flatten().index_select(0, expansion.pair)


def reduce(rows: torch.Tensor, expansion: Expansion) -> torch.Tensor:
    """Each token's sum of rows, in fp32, rounded once: [P, H] to [n, H]. Differentiable."""
    if not needs_gradient(rows, None):
        return add_up(rows, expansion)
    sums: torch.Tensor = apply(_Reduce, rows, expansion)
    return sums


class _Linear(torch.autograd.Function):
    """`_Expand` or `_Reduce`: each is the other's gradient, so there are gradients of any order."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.expansion = inputs[1]

    @classmethod
    def jvp(cls, ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = apply(cls, tangents[0], ctx.expansion)
        return result

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], batch: torch.Tensor,
             expansion: Expansion) -> tuple[torch.Tensor, int]:
        return torch.stack([apply(cls, each, expansion) for each in batch.unbind(in_dims[0])]), 0


class _Expand(_Linear):
    @staticmethod
    def forward(tokens: torch.Tensor, expansion: Expansion) -> torch.Tensor:
        return spread(tokens, expansion)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return reduce(grads[0], ctx.expansion), None


class _Reduce(_Linear):
    @staticmethod
    def forward(rows: torch.Tensor, expansion: Expansion) -> torch.Tensor:
        return add_up(rows, expansion)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return expand(grads[0], ctx.expansion), None
