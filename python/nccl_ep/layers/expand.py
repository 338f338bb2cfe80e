"""From received tokens to rows sorted by expert, and back: gathers and sums in torch.

A rank receives a token once, however many of its experts the token has. Experts want a row for each
(token, expert) pair; results go home as one row for each token again, summed in fp32.
"""

from __future__ import annotations

from typing import Any

import torch

from nccl_ep.layers.layout import Expansion


def by_expert(topk_idx: torch.Tensor, num_local_experts: int,
              positions: torch.Tensor | None = None) -> tuple[Expansion, torch.Tensor]:
    """The expansion of received tokens with local ids `topk_idx` [n, K], and rows per expert.

    Rows are sorted by expert, then in the order of the received tokens; or, given `positions`
    [n, K], each pair has the row of that number. -1 is no expert. Waits for the GPU: the number of
    rows is the shape of what follows.
    """
    # Ids ascend to the left of -1, so a token has at most as many columns as there are experts.
    columns = min(topk_idx.shape[1], num_local_experts)
    ids = topk_idx[:, :columns]
    tokens, slots = (ids >= 0).nonzero(as_tuple=True)
    experts = ids[tokens, slots]
    counts = torch.bincount(experts, minlength=num_local_experts)
    count = experts.numel()
    number = torch.arange(count, device=ids.device)
    if positions is None:
        row_of_pair = torch.empty_like(number)
        row_of_pair[experts.argsort(stable=True)] = number
    else:
        row_of_pair = positions[tokens, slots]
        _check_positions(row_of_pair, experts, counts)
    pair = torch.empty_like(tokens)
    pair[row_of_pair] = tokens * topk_idx.shape[1] + slots
    rows = torch.full((topk_idx.shape[0], columns), -1, dtype=torch.int64, device=ids.device)
    rows[tokens, slots] = row_of_pair
    return Expansion(pair // max(topk_idx.shape[1], 1), pair, rows), counts.to(torch.int32)


def _check_positions(rows: torch.Tensor, experts: torch.Tensor, counts: torch.Tensor) -> None:
    """Every row once, and each within the block of its expert."""
    number = torch.arange(rows.numel(), device=rows.device)
    blocks = torch.repeat_interleave(torch.arange(counts.numel(), device=rows.device), counts)
    order = rows.argsort()
    if not bool((rows[order] == number).all()) or not bool((experts[order] == blocks).all()):
        raise ValueError("full_scatter_indices: no order of rows by expert for this routing")


def expand(tokens: torch.Tensor, expansion: Expansion) -> torch.Tensor:
    """A row for each pair: [n, H] to [P, H]. Differentiable."""
    return _Expand.apply(tokens, expansion)


def weight_of_row(topk_weights: torch.Tensor, expansion: Expansion) -> torch.Tensor:
    """The weight of each pair: [n, K] to [P]. Differentiable."""
    return topk_weights.flatten().index_select(0, expansion.pair)


def reduce(rows: torch.Tensor, expansion: Expansion) -> torch.Tensor:
    """Each token's sum of rows, in fp32, rounded once: [P, H] to [n, H]. Has gradients."""
    return _Reduce.apply(rows, expansion)


def _gather(tokens: torch.Tensor, expansion: Expansion) -> torch.Tensor:
    return tokens.index_select(0, expansion.source)


def _sum(rows: torch.Tensor, expansion: Expansion) -> torch.Tensor:
    # Column by column, which is the order of experts: always the same sum, as index_add's is not.
    shape = (expansion.rows.shape[0], rows.shape[1])
    total = torch.zeros(shape, dtype=torch.float32, device=rows.device)
    if rows.shape[0] > 0:
        for column in expansion.rows.unbind(1):
            part = rows.index_select(0, column.clamp(min=0))
            total += part.masked_fill_((column < 0).unsqueeze(1), 0)
    return total.to(rows.dtype)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, expansion: Expansion) -> torch.Tensor:
        ctx.expansion = expansion
        return _gather(tokens, expansion)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _sum(grad, ctx.expansion), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, expansion: Expansion) -> torch.Tensor:
        ctx.expansion = expansion
        return _sum(rows, expansion)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _gather(grad, ctx.expansion), None
