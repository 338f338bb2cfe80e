"""Which row of which rank each (token, expert) pair of this rank gets in dispatch's output."""

from __future__ import annotations

import dataclasses

import torch

from nccl_ep.layers.layout import EPConfig
from nccl_ep.routing import stable_sort
from nccl_ep.runtime import HostCopy


@dataclasses.dataclass(frozen=True)
class HostCounts:
    """The numbers that decide about shapes, on the host; `most_rows` are those of the rank that has
    the most rows."""

    tokens: list[int]
    rows_per_expert: list[int]
    most_rows: int


def own_pairs(ids: torch.Tensor, config: EPConfig) -> torch.Tensor:
    """int32 [R, E + 1]: in this rank's row its pairs for each expert, and places without one."""
    table = torch.zeros((config.world_size, config.num_experts + 1), dtype=torch.int32,
                        device=ids.device)
    flat = ids.flatten()
    table[config.rank].scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return table


class Counts:
    """Pairs of each rank for each expert, on the device.

    pairs int32 [R, E]; per_expert int64 [E], of all ranks; rows_per_expert int32 [L], those of this
    rank's experts; tokens int32 [R], tokens of each rank
    """

    def __init__(self, table: torch.Tensor, config: EPConfig) -> None:
        """`table` is the sum of all ranks' `own_pairs`."""
        self._config = config
        first = config.rank * config.num_experts_per_rank
        self.pairs = table[:, :-1]
        self.per_expert = self.pairs.sum(dim=0)
        local = self.per_expert[first:first + config.num_experts_per_rank]
        self.rows_per_expert = local.to(torch.int32)
        # Every token has K places, with an expert or without.
        self.tokens = (table.sum(dim=1) // config.topk).to(torch.int32)
        self._copy = HostCopy(torch.cat([self.tokens, self.per_expert]))

    def on_host(self) -> HostCounts:
        """Waits until all ranks have counted."""
        config, numbers = self._config, self._copy.wait().tolist()
        tokens, per_expert = numbers[:config.world_size], numbers[config.world_size:]
        local = config.num_experts_per_rank
        blocks = [per_expert[begin:begin + local] for begin in range(0, len(per_expert), local)]
        return HostCounts(tokens, blocks[config.rank], max(sum(block) for block in blocks))


def stable_positions(ids: torch.Tensor, counts: Counts, config: EPConfig) -> torch.Tensor:
    """The row [T, K] of each pair if rows are sorted by expert, then source rank, then token.

    -1 for places that take no part.
    """
    keys, order = stable_sort(ids.flatten(), config.num_experts)
    # Where this rank's pairs of an expert begin: after other experts of the same rank, and after
    # the pairs of lower ranks.
    local = counts.per_expert.view(config.world_size, config.num_experts_per_rank)
    begins = (local.cumsum(dim=1) - local).flatten() + counts.pairs[:config.rank].sum(dim=0)
    own = counts.pairs[config.rank]
    base = torch.cat([begins - (own.cumsum(dim=0) - own), begins.new_zeros(1)])
    number = torch.arange(keys.numel(), device=keys.device)
    rows = torch.where(keys < config.num_experts, base[keys] + number, -1)
    return torch.empty_like(rows).scatter_(0, order, rows).view(ids.shape)


def given_positions(full: torch.Tensor, ids: torch.Tensor, counts: Counts,
                    config: EPConfig) -> torch.Tensor:
    """The rows [T, K] from `full`: numbers of pairs in the order of all experts of all ranks.

    `full` is [T, K], or [sum of T, K] for the tokens of all ranks, or [R * max_tokens, K] padded.
    Places that take no part count last.
    """
    tokens = counts.on_host().tokens
    if full.dim() != 2 or full.shape[1] != ids.shape[1]:
        raise ValueError(f"full_scatter_indices: has shape {list(full.shape)}, expected "
                         f"[..., {ids.shape[1]}]")
    begin = _first_row(full.shape[0], tokens, config)
    own = full[begin:begin + ids.shape[0]].to(torch.int64)
    per_rank = counts.per_expert.view(config.world_size, config.num_experts_per_rank).sum(dim=1)
    begins = per_rank.cumsum(dim=0) - per_rank
    part = ids < config.num_experts
    ranks = torch.where(part, ids, 0) // config.num_experts_per_rank
    return torch.where(part, own - begins[ranks], -1)


def _first_row(rows: int, tokens: list[int], config: EPConfig) -> int:
    """Where this rank's tokens begin in indices of so many rows."""
    mine, total = tokens[config.rank], sum(tokens)
    # Where two of the three have the same length, they mean the same, too.
    if rows == mine:
        return 0
    if rows == total:
        return sum(tokens[:config.rank])
    if rows == config.world_size * config.max_tokens and mine <= config.max_tokens:
        return config.rank * config.max_tokens
    raise ValueError(f"full_scatter_indices: has {rows} rows, expected {total} or {mine}")
