"""The layout of a dispatch by one Triton kernel. Importing this module imports Triton."""
# Triton compiles its functions from source and has no types.
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 32  # tokens


@triton.jit(do_not_specialize=["tokens", "width", "experts", "local", "ranks"])
def _count(ids, counts, goes, tokens, width, experts, local, ranks, BLOCK: tl.constexpr, RANKS: tl.constexpr):
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_token = token < tokens
    rank = tl.arange(0, RANKS)
    found = tl.zeros((BLOCK, RANKS), tl.int32)
    for place in range(width):
        expert = tl.load(ids + token * width + place, mask=is_token, other=-1)
        is_known = (expert >= 0) & (expert < experts)
        tl.atomic_add(counts + expert, 1, mask=is_known)
        found |= (((expert // local)[:, None] == rank[None, :]) & is_known[:, None]).to(tl.int32)
    is_rank = rank < ranks
    tl.store(goes + token[:, None] * ranks + rank[None, :], found.to(tl.uint8),
             mask=is_token[:, None] & is_rank[None, :])
    tl.atomic_add(counts + experts + rank, tl.sum(found, axis=0), mask=is_rank)


def try_out(device: torch.device) -> None:
    """Runs it."""
    counted(torch.zeros((1, 1), dtype=torch.int64, device=device), 1, 1)


def counted(ids: torch.Tensor, num_experts: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """num_tokens_per_rank, per_expert and is_token_in_rank of contiguous ids [T, K]."""
    tokens, width = ids.shape
    counts = torch.zeros(num_experts + num_ranks, dtype=torch.int32, device=ids.device)
    goes = torch.empty((tokens, num_ranks), dtype=torch.uint8, device=ids.device)
    if tokens:
        # Triton launches on the current GPU.
        with torch.cuda.device(ids.device):
            _count[(triton.cdiv(tokens, _BLOCK),)](
                ids, counts, goes, tokens, width, num_experts, num_experts // num_ranks, num_ranks, BLOCK=_BLOCK,
                RANKS=triton.next_power_of_2(num_ranks))
    return counts[num_experts:], counts[:num_experts], goes.view(torch.bool)
