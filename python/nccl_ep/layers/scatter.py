"""Which row of which rank each (token, expert) pair of this rank gets in dispatch's output."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nccl_ep.layers.layout import EPConfig
from nccl_ep.rendezvous import collective_device


def exchange_counts(topk_idx: torch.Tensor, config: EPConfig,
                    ep_group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [R, E], pairs of each rank for each expert, and [R], tokens of a rank. Collective."""
    counts = torch.bincount(topk_idx[_takes_part(topk_idx, config)], minlength=config.num_experts)
    mine = torch.cat([counts, counts.new_tensor([topk_idx.shape[0]])])
    mine = mine.to(collective_device(dist, ep_group))
    everyone = [torch.empty_like(mine) for _ in range(config.world_size)]
    dist.all_gather(everyone, mine, group=ep_group)
    table = torch.stack(everyone).to(topk_idx.device)
    return table[:, :-1], table[:, -1]


def stable_positions(topk_idx: torch.Tensor, counts: torch.Tensor,
                     config: EPConfig) -> torch.Tensor:
    """The row [T, K] of each pair if rows are sorted by expert, then source rank, then token.

    -1 for ids that take no part. `counts` are those of `exchange_counts`.
    """
    keys = torch.where(_takes_part(topk_idx, config), topk_idx, config.num_experts).flatten()
    order = keys.argsort(stable=True)
    sorted_keys = keys[order]
    # Where this rank's pairs of an expert begin: after other experts of the same rank, and after
    # the pairs of lower ranks.
    local = counts.sum(dim=0).view(config.world_size, config.num_experts_per_rank)
    begins = (local.cumsum(dim=1) - local).flatten() + counts[:config.rank].sum(dim=0)
    own = counts[config.rank]
    base = torch.cat([begins - (own.cumsum(dim=0) - own), begins.new_zeros(1)])
    number = torch.arange(keys.numel(), device=keys.device)
    rows = torch.where(sorted_keys < config.num_experts, base[sorted_keys] + number, -1)
    positions = torch.empty_like(rows)
    positions[order] = rows
    return positions.view(topk_idx.shape)


def given_positions(full: torch.Tensor, topk_idx: torch.Tensor, counts: torch.Tensor,
                    tokens: torch.Tensor, config: EPConfig) -> torch.Tensor:
    """The rows [T, K] from `full`: numbers of pairs in the order of all experts of all ranks.

    `full` is [T, K], or [sum of T, K] for the tokens of all ranks, or [R * max_tokens, K] padded.
    Ids that take no part count last.
    """
    rows, mine, total = full.shape[0], topk_idx.shape[0], int(tokens.sum())
    if full.dim() != 2 or full.shape[1] != topk_idx.shape[1]:
        raise ValueError(f"full_scatter_indices: has shape {list(full.shape)}, expected "
                         f"[..., {topk_idx.shape[1]}]")
    # Where two of the three have the same length, they mean the same, too.
    if rows == mine:
        begin = 0
    elif rows == total:
        begin = int(tokens[:config.rank].sum())
    elif rows == config.world_size * config.max_tokens and mine <= config.max_tokens:
        begin = config.rank * config.max_tokens
    else:
        raise ValueError(f"full_scatter_indices: has {rows} rows, expected {total} or {mine}")
    own = full[begin:begin + mine].to(torch.int64)
    per_rank = counts.sum(dim=0).view(config.world_size, config.num_experts_per_rank).sum(dim=1)
    begins = per_rank.cumsum(dim=0) - per_rank
    part = _takes_part(topk_idx, config)
    ranks = torch.where(part, topk_idx, 0) // config.num_experts_per_rank
    return torch.where(part, own - begins[ranks], -1)


def _takes_part(topk_idx: torch.Tensor, config: EPConfig) -> torch.Tensor:
    return (topk_idx >= 0) & (topk_idx < config.num_experts)
