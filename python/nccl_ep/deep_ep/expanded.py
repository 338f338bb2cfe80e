"""Rows by expert, a row for each (token, expert): each expert's begin at a multiple of an alignment."""

from __future__ import annotations

import dataclasses
import functools

import torch

from nccl_ep.layers.expand import expert_columns
from nccl_ep.layers.layout import Expansion
from nccl_ep.routing import stable_sort


@dataclasses.dataclass
class PaddedExpansion(Expansion):
    """With rows between experts that are no token's: `filled` bool [P] says which are."""

    filled: torch.Tensor

    @functools.cached_property
    def bags(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As of any; of rows of tokens alone. Waits for the GPU."""
        taken = self.slots >= 0
        ends = taken.sum(dim=1).cumsum(dim=0)
        return self.slots[taken].to(torch.int64), torch.cat([ends.new_zeros(1), ends])


def aligned_begins(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """int64 [L + 1]: where the rows of each expert begin, and the last end."""
    steps = (counts.to(torch.int64) + alignment - 1) // alignment * alignment
    return torch.cat([steps.new_zeros(1), steps.cumsum(dim=0)])


def most_rows(tokens: int, top_k: int, num_local_experts: int, alignment: int) -> int:
    """Rows that are enough for any routing of so many tokens that come."""
    rows = tokens * min(top_k, num_local_experts) + num_local_experts * (alignment - 1)
    return -(-rows // alignment) * alignment


def padded_expansion(topk_idx: torch.Tensor, counts: torch.Tensor, alignment: int, num_rows: int) -> PaddedExpansion:
    """For received tokens with local ids `topk_idx` [n, K], of which each expert has `counts` int32 [L], in
    `num_rows` rows. Nobody waits."""
    local = counts.shape[0]
    ids = expert_columns(topk_idx, local)
    experts, places = stable_sort(ids.remainder(local + 1).flatten(), local)
    experts = experts.to(torch.int64)
    before = counts.cumsum(dim=0) - counts
    # Entries without an expert go behind all rows.
    shift = torch.cat([aligned_begins(counts, alignment)[:-1] - before, before.new_zeros(1)])
    number = torch.arange(experts.numel(), device=ids.device)
    row = torch.where(experts < local, shift[experts] + number, num_rows)
    pair = torch.zeros(num_rows + 1, dtype=torch.int64, device=ids.device).scatter_(0, row, places)
    filled = torch.zeros(num_rows + 1, dtype=torch.bool, device=ids.device).scatter_(0, row, experts < local)
    slots = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    slots.scatter_(0, places, torch.where(experts < local, row, -1).to(torch.int32))
    return PaddedExpansion(pair[:num_rows], slots.view(ids.shape), filled[:num_rows])
