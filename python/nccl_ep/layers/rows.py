"""Tokens to rows and rows to sums, without gradients: by Triton on GPUs, else by torch.

Both sum in fp32, in the order of experts, and round once.
"""

from __future__ import annotations

from types import ModuleType

import torch

from nccl_ep.layers.layout import Expansion
from nccl_ep.runtime import kept
from nccl_ep.triton_kernels import working

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def spread(tokens: torch.Tensor, expansion: Expansion) -> torch.Tensor:
    """A row for each pair: [n, H] to [P, H]."""
    kernels = _kernels_for(tokens)
    if kernels is None or not expansion.num_rows:
        return spread_by_torch(tokens, expansion)
    rows: torch.Tensor = kernels.spread(tokens, kept(expansion.slots), expansion.num_rows)
    return rows


def add_up(rows: torch.Tensor, expansion: Expansion) -> torch.Tensor:
    """Each token's sum of rows: [P, H] to [n, H]."""
    kernels = _kernels_for(rows)
    if kernels is None or not expansion.num_rows:
        return add_up_by_torch(rows, expansion)
    sums: torch.Tensor = kernels.add_up(rows, kept(expansion.slots))
    return sums


def spread_by_torch(tokens: torch.Tensor, expansion: Expansion) -> torch.Tensor:
    """`spread` for all types and devices. Reads a token once per row."""
    return tokens.index_select(0, kept(expansion.source))


def add_up_by_torch(rows: torch.Tensor, expansion: Expansion) -> torch.Tensor:
    """`add_up` for all types and devices."""
    order, offsets = map(kept, expansion.bags)
    if rows.shape[0] == 0:
        return rows.new_zeros((offsets.numel() - 1, rows.shape[1]))
    # A GPU adds 16-bit rows in fp32. The CPU adds in fp32 only if the rows are fp32; for others it
    # rounds intermediate sums.
    wide = rows if rows.is_cuda else rows.to(torch.float32)
    total = torch.nn.functional.embedding_bag(order, wide, offsets, mode="sum",
                                              include_last_offset=True)
    return total.to(rows.dtype)


def prepare(dtype: torch.dtype, hidden: int, width: int, device: torch.device) -> None:
    """Builds the kernels for such rows now, so that no rank later waits for another's compiler."""
    if device.type != "cuda" or dtype not in _TYPES:
        return
    slots = torch.zeros((1, width), dtype=torch.int32, device=device)
    once = Expansion(torch.zeros(1, dtype=torch.int64, device=device), slots)
    add_up(spread(torch.zeros((1, hidden), dtype=dtype, device=device), once), once)


def _kernels_for(tensor: torch.Tensor) -> ModuleType | None:
    if not tensor.is_cuda or tensor.dtype not in _TYPES:
        return None
    return triton_kernels(tensor.device)


def triton_kernels(device: torch.device) -> ModuleType | None:
    """The module `kernels` if Triton is installed and works on this GPU."""
    return working("nccl_ep.layers.kernels", device)
