"""Triton kernels that spread tokens over rows and add rows up; memory is read and written once.

`slots` int32 [n, C] has the rows of each token, -1 where there is none. Importing this module
imports Triton.
"""
# Triton compiles its functions from source and has no types.
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# A thread has 8 elements: with 16 bits each, one load of 16 bytes per row.
_BLOCK = 1024
_WARPS = 4


@triton.jit
def _spread(tokens, slots, rows, hidden, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    value = tl.load(tokens + token * hidden + column, mask=inside)
    for place in tl.static_range(WIDTH):
        row = tl.load(slots + token * WIDTH + place).to(tl.int64)
        tl.store(rows + row * hidden + column, value, mask=inside & (row >= 0))


@triton.jit
def _add_up(rows, slots, sums, hidden, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(WIDTH):
        row = tl.load(slots + token * WIDTH + place).to(tl.int64)
        part = tl.load(rows + row * hidden + column, mask=inside & (row >= 0), other=0.0)
        total += part.to(tl.float32)
    tl.store(sums + token * hidden + column, total.to(sums.dtype.element_ty), mask=inside)


def spread(tokens: torch.Tensor, slots: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[n, H] to [P, H]; every one of the P rows is in `slots`."""
    rows = tokens.new_empty((num_rows, tokens.shape[1]))
    _launch(_spread, tokens.contiguous(), slots, rows)
    return rows


def add_up(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[P, H] to [n, H]: each token's rows from left to right, in fp32, rounded once."""
    sums = rows.new_empty((slots.shape[0], rows.shape[1]))
    _launch(_add_up, rows.contiguous(), slots, sums)
    return sums


def try_out(device: torch.device) -> None:
    """Runs both."""
    one = torch.zeros((1, 1), dtype=torch.int32, device=device)
    add_up(spread(torch.zeros((1, 8), dtype=torch.float32, device=device), one, 1), one)


def _launch(kernel: Any, source: torch.Tensor, slots: torch.Tensor, target: torch.Tensor) -> None:
    (tokens, width), hidden = slots.shape, target.shape[1]
    grid = (tokens, triton.cdiv(hidden, _BLOCK))
    # Triton launches on the current GPU.
    with torch.cuda.device(target.device):
        kernel[grid](source, slots, target, hidden, WIDTH=width, BLOCK=_BLOCK, num_warps=_WARPS)
