"""Checks of the rows that `EPAll2AllLayer` dispatches, with scales or without."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nccl_ep.group import ROW_TYPES
from nccl_ep.layers.layout import EPConfig
from nccl_ep.scales import (CastName, ScaledRows, ScalesOrder, check_order, checked_scales,
                            scaled_rows)
from nccl_ep.tensors import checked
from nccl_ep.types import ncclDataTypeEnum

_ALIGN = 16  # bytes


class Scaling(NamedTuple):
    """What a caller of `dispatch` says about scales."""

    scales: torch.Tensor | None
    cast: CastName | None
    order: ScalesOrder


def checked_rows(input: torch.Tensor, scaling: Scaling, config: EPConfig,
                 device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`input` and the scales, as the library takes them; raises for all that it would refuse.

    The library would refuse later, when other ranks wait for this one's rows.
    """
    check_order(scaling.order)
    scales, cast = scaling.scales, scaling.cast
    if scales is None and cast is None:
        return checked("input", input, ("T", config.hidden), device, config.token_dtype), None
    # Rows that are forwarded may be packed, and so shorter.
    input = checked("input", input, ("T", "H" if cast is None else config.hidden), device)
    if scales is not None:
        scales = checked_scales(scales, input.shape[0], device)
    elif input.dtype not in ROW_TYPES:
        raise ValueError(f"input: has type {input.dtype}, but a cast takes one of "
                         f"{', '.join(map(str, ROW_TYPES))}; rows of other types need scales")
    _check_bytes(input.shape[1], scaled_rows(input, scales, cast), config)
    return input, scales


def refuse_gradients(scaling: Scaling, *tensors: torch.Tensor | None) -> None:
    """Raises if rows have scales, and one of `tensors` requires a gradient that none would get."""
    if scaling.scales is None and scaling.cast is None or not torch.is_grad_enabled():
        return
    if any(each is not None and each.requires_grad for each in (*tensors, scaling.scales)):
        raise RuntimeError("dispatch: its tensors require gradients, but rows with scales have "
                           "none; call it under torch.no_grad(), or with detached tensors")


def _check_bytes(columns: int, rows: ScaledRows, config: EPConfig) -> None:
    """Raises ValueError unless the library takes such rows, and the layer has room for them."""
    ncclDataTypeEnum.from_torch(rows.dtype)
    ncclDataTypeEnum.of_scales(rows.scale_dtype)
    if rows.scale_dtype.itemsize > 4:
        raise ValueError(f"scales: has type {rows.scale_dtype}, expected one of 1, 2 or 4 bytes")
    payload, scales = columns * rows.dtype.itemsize, rows.scales * rows.scale_dtype.itemsize
    if not payload or payload % _ALIGN:
        raise ValueError(f"input: a row of {rows.dtype} has {payload} bytes, expected a positive "
                         f"multiple of {_ALIGN}")
    bound = config.hidden * config.token_dtype.itemsize
    if payload - (-scales // _ALIGN) * _ALIGN > bound:
        raise ValueError(f"input: a row and its scales have {payload} + {scales} bytes, more than "
                         f"a row of the layer, {bound}")
