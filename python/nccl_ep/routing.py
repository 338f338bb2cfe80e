"""Facts about top-k ids that every part of the package needs."""

from __future__ import annotations

import torch


def effective_ids(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """`topk_idx` [T, K] as int64, with `num_experts` where a place takes no part.

    Those are ids outside 0..E-1, and all but the last occurrence of an id that a token repeats:
    high throughput counts it once, with its last weight.
    """
    # Few operations: on a GPU each costs the host more time than the GPU. Ids outside become E.
    ids = topk_idx.to(torch.int64).clamp(-1, num_experts).remainder(num_experts + 1)
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
