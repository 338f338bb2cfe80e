"""Facts about top-k ids that every part of the package needs."""

from __future__ import annotations

import torch


def known_ids(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """`topk_idx` [T, K] as int64, with `num_experts` for ids outside 0..E-1, which take no part."""
    # Few operations: on a GPU each costs the host more time than the GPU.
    return topk_idx.to(torch.int64).clamp(-1, num_experts).remainder(num_experts + 1)


def pairs_of_ids(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """`known_ids`, in which of an id that a token repeats only the last one is left.

    In high throughput the token and the expert are one pair, with the sum of the weights.
    """
    ids = known_ids(topk_idx, num_experts)
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    return ids.masked_fill_(same.triu(1).any(dim=2), num_experts)


def stable_sort(keys: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted integer `keys`, all in 0..`most`, and their previous positions, int64.

    Equal keys keep their order. A GPU sorts short integers in fewer passes.
    """
    narrow = next((dtype for dtype in (torch.uint8, torch.int16)
                   if most <= torch.iinfo(dtype).max), torch.int32)
    ordered, places = torch.sort(keys.to(narrow), stable=True)
    return ordered, places


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
