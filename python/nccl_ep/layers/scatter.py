"""Computes the row and rank of each of this rank's (token, expert) pairs in dispatch's output."""

from __future__ import annotations

import dataclasses
import functools

import torch

from nccl_ep.layers.layout import EPConfig
from nccl_ep.routing import stable_sort

# Row numbers travel as float32, which represents every integer only up to here.
MOST_ROWS = 1 << 24


def own_pairs(ids: torch.Tensor, config: EPConfig) -> torch.Tensor:
    """int32 [R, E + 1]: this rank's row has its pairs per expert, then its entries without one."""
    table = torch.zeros((config.world_size, config.num_experts + 1), dtype=torch.int32,
                        device=ids.device)
    flat = ids.flatten()
    table[config.rank].scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return table


class Counts:
    """Pairs of each rank for each expert, and numbers derived from them on demand."""

    def __init__(self, table: torch.Tensor, config: EPConfig) -> None:
        """`table` is the sum of all ranks' `own_pairs`."""
        self._table, self._config = table, config

    @functools.cached_property
    def tokens(self) -> torch.Tensor:
        """int32 [R]: tokens of each rank."""
        # Every token has K entries, with or without an expert.
        return self._table.sum(dim=1, dtype=torch.int32) // self._config.topk

    @property
    def pairs(self) -> torch.Tensor:
        """int32 [R, E]."""
        return self._table[:, :-1]

    @functools.cached_property
    def per_expert(self) -> torch.Tensor:
        """int64 [E]: pairs of all ranks."""
        return self.pairs.sum(dim=0)

    @functools.cached_property
    def per_rank(self) -> torch.Tensor:
        """int64 [R]: rows of each rank."""
        return self.per_expert.view(self._config.world_size, -1).sum(dim=1)


@dataclasses.dataclass
class Destinations:
    """The destinations of this rank's pairs.

    ids    int64 [T, K], of 0..E, E is none
    given  the rows, if the caller chose them
    """

    ids: torch.Tensor
    counts: Counts
    config: EPConfig
    given: torch.Tensor | None = None

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """int64 [T, K]: each pair's row on its expert's rank; -1 for entries that take no part."""
        if self.given is not None:
            return self.given
        return stable_positions(self.ids, self.counts, self.config)


def stable_positions(ids: torch.Tensor, counts: Counts, config: EPConfig) -> torch.Tensor:
    """The row [T, K] of each pair if rows are sorted by expert, then source rank, then token.

    -1 for entries that take no part.
    """
    keys, order = stable_sort(ids.flatten(), config.num_experts)
    # Where this rank's pairs of an expert begin: after lower experts of the same rank, and after
    # the pairs of lower ranks.
    local = counts.per_expert.view(config.world_size, config.num_experts_per_rank)
    begins = (local.cumsum(dim=1) - local).flatten() + counts.pairs[:config.rank].sum(dim=0)
    own = counts.pairs[config.rank]
    base = torch.cat([begins - (own.cumsum(dim=0) - own), begins.new_zeros(1)])
    number = torch.arange(keys.numel(), device=keys.device)
    keys = keys.to(torch.int64)
    rows = torch.where(keys < config.num_experts, base[keys] + number, -1)
    return torch.empty_like(rows).scatter_(0, order, rows).view(ids.shape)


def given_positions(full: torch.Tensor, ids: torch.Tensor, counts: Counts,
                    config: EPConfig) -> torch.Tensor:
    """The rows [T, K] from `full`: numbers of pairs in the order of all experts of all ranks.

    `full` is [T, K], or [sum of T, K] for the tokens of all ranks, or [R * max_tokens, K] padded.
    Entries that take no part count last. Waits for the GPU.
    """
    if int(counts.per_rank.max()) > MOST_ROWS:
        raise ValueError(f"full_scatter_indices: more than {MOST_ROWS} rows on a rank")
    begin = _first_row(full.shape[0], counts.tokens.tolist(), config)
    own = full[begin:begin + ids.shape[0]].to(torch.int64)
    begins = counts.per_rank.cumsum(dim=0) - counts.per_rank
    part = ids < config.num_experts
    ranks = torch.where(part, ids, 0) // config.num_experts_per_rank
    return torch.where(part, own - begins[ranks], -1)


def _first_row(rows: int, tokens: list[int], config: EPConfig) -> int:
    """Where this rank's tokens begin in indices with this many rows."""
    mine, total = tokens[config.rank], sum(tokens)
    # If two of the three lengths are equal, they also mean the same.
    if rows == mine:
        return 0
    if rows == total:
        return sum(tokens[:config.rank])
    if rows == config.world_size * config.max_tokens and mine <= config.max_tokens:
        return config.rank * config.max_tokens
    raise ValueError(f"full_scatter_indices: has {rows} rows, expected {total} or {mine}")
