"""Scales of the rows of a dispatch: which a cast makes, and how they lie (docs/formats.md)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from nccl_ep.arguments import require_no_gradient, require_tensor
from nccl_ep.types import ncclDataTypeEnum

CastName = Literal["fp8", "fp8_pow2", "ue8m0", "ue8m0_packed", "mxfp8"]
ScalesOrder = Literal["row", "column"]

_COLUMN_BYTES = 16  # matrix products read columns by so many


class _Cast(NamedTuple):
    """What a cast stores for a row: one scale of `dtype` for so many elements."""

    dtype: torch.dtype
    elements: int
    round_scales: bool = False


_CASTS = {
    "fp8": _Cast(torch.float32, 128),
    "fp8_pow2": _Cast(torch.float32, 128, round_scales=True),
    "ue8m0": _Cast(torch.uint8, 128),
    "ue8m0_packed": _Cast(torch.int32, 4 * 128),
    "mxfp8": _Cast(torch.uint8, 32),
}


class ScaledRows(NamedTuple):
    """The rows that a dispatch delivers, and its option for their scales."""

    dtype: torch.dtype
    scale_dtype: torch.dtype
    scales: int
    round_scales: bool


def scaled_rows(tokens: torch.Tensor, scales: torch.Tensor | None, cast: str | None) -> ScaledRows:
    """Of a dispatch with `scales` that are forwarded, or with a cast."""
    if scales is not None:
        if cast is not None:
            raise ValueError("cast: rows that have scales are forwarded as they are")
        return ScaledRows(tokens.dtype, scales.dtype, scales.shape[1], False)
    if cast not in tuple(_CASTS):  # what is no text may have no hash
        raise ValueError(f"cast: must be one of {', '.join(_CASTS)}, not {cast!r}")
    made = _CASTS[cast]
    count = -(-tokens.shape[1] // made.elements)
    return ScaledRows(torch.float8_e4m3fn, made.dtype, count, made.round_scales)


def checked_scales(scales: torch.Tensor, rows: int, device: torch.device) -> torch.Tensor:
    """Scales [rows, S] to forward, as they lie if that is by rows or by columns, with a pitch or without."""
    require_tensor("scales", scales)
    if scales.dim() != 2 or scales.shape[0] != rows:
        raise ValueError(f"scales: has shape {list(scales.shape)}, expected [{rows}, S]")
    if scales.device != device:
        raise ValueError(f"scales: is on {scales.device}, the group on {device}")
    # The library sees the memory only; torch may keep a pending negation beside it.
    scales = scales.resolve_neg()
    columns, (down, across) = scales.shape[1], scales.stride()
    is_known = across == 1 and down >= columns or down == 1 and across >= rows
    return scales if is_known else scales.contiguous()


def check_scale_output(scales: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Raises for memory for scales of `dtype` that the library could not check or write to."""
    require_tensor("out_scales", scales)
    if scales.device != device:
        raise ValueError(f"out_scales: is on {scales.device}, the group on {device}")
    if ncclDataTypeEnum.of_scales(scales.dtype) != ncclDataTypeEnum.of_scales(dtype):
        raise ValueError(f"out_scales: has type {scales.dtype}, expected {dtype}")
    if scales.is_neg():
        raise ValueError("out_scales: must be no negative view")
    require_no_gradient("out_scales", scales)


def check_order(order: str) -> None:
    """Raises ValueError unless `order` is one of `ScalesOrder`."""
    if order not in ("row", "column"):
        raise ValueError(f"scales_order: must be row or column, not {order!r}")


def new_scales(shape: tuple[int, ...], dtype: torch.dtype, order: str, device: torch.device,
               zeros: bool = False) -> torch.Tensor:
    """Memory for scales [..., rows, S], maybe of `zeros`. By columns, these are a multiple of 16 bytes apart."""
    check_order(order)
    new = torch.zeros if zeros else torch.empty
    if order == "row":
        return new(shape, dtype=dtype, device=device)
    *experts, rows, columns = shape
    step = _COLUMN_BYTES // dtype.itemsize
    pitch = torch.sym_max(-(-rows // step), 1) * step  # rows of traced code may be unknown
    memory = new((*experts, columns, pitch), dtype=dtype, device=device)
    return memory.transpose(-1, -2)[..., :rows, :]
