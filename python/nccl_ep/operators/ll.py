"""Operators of low latency: `torch.ops.nccl_ep.ll_*`.

A handle lives as long as the program that replays it, so its number stands for it. Each operation
gets the ids, which a compiler may keep elsewhere than in the handle's tensor, and writes them there.
Their arguments are those of `EpHandle`; `group` is `EpGroup.number`, `handle` `EpHandle.number`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nccl_ep.operators.define import define
from nccl_ep.operators.numbers import find
from nccl_ep.row_layout import low_latency_shape
from nccl_ep.scales import new_scales, scaled_rows

if TYPE_CHECKING:
    from nccl_ep.group import EpGroup
    from nccl_ep.handle import EpHandle

_Tensors = tuple[torch.Tensor, ...]


@define("ll_dispatch(Tensor tokens, Tensor? scales, Tensor topk_idx, Tensor? topk_weights, str? cast, "
        "str scales_order, SymInt handle, int group, bool send_only) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def ll_dispatch(tokens: torch.Tensor, scales: torch.Tensor | None, topk_idx: torch.Tensor,
                topk_weights: torch.Tensor | None, cast: Any, scales_order: Any, handle: int, group: int,
                send_only: bool) -> _Tensors:
    """tokens [T, H] to rows [L, R*M, H], counts int32 [L], and scales; with weights to rows [R, M, H], counts [R],
    scales, ids and weights [R, M, K]. What there is not is [0]."""
    received = _with_ids(handle, topk_idx).dispatch(
        tokens, topk_weights, layout="expert" if topk_weights is None else "rank", scales=scales, cast=cast,
        scales_order=scales_order, send_only=send_only)
    found = received.tokens, received.counts, received.scales, received.topk_idx, received.topk_weights
    return tuple(tokens.new_empty(0) if each is None else each for each in found)


@ll_dispatch.register_fake
def _(tokens: torch.Tensor, scales: torch.Tensor | None, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None,
      cast: Any, scales_order: Any, handle: int, group: int, send_only: bool) -> _Tensors:
    ep: EpGroup = find("group", group)
    shape = low_latency_shape(ep, tokens.shape[1], topk_weights is not None)
    dtype, (row_scales, ids, weights) = tokens.dtype, (tokens.new_empty(0) for _ in range(3))
    if scales is not None or cast is not None:
        rows = scaled_rows(tokens, scales, cast)
        dtype, row_scales = rows.dtype, new_scales((*shape[:2], rows.scales), rows.scale_dtype, scales_order,
                                                   tokens.device)
    if topk_weights is not None:
        routing = (*shape[:2], topk_idx.shape[1])
        ids, weights = tokens.new_empty(routing, dtype=torch.int64), tokens.new_empty(routing, dtype=torch.float32)
    return (tokens.new_empty(shape, dtype=dtype), tokens.new_empty(shape[:1], dtype=torch.int32), row_scales, ids,
            weights)


@define("ll_combine(Tensor rows, Tensor topk_idx, Tensor? topk_weights, SymInt handle, "
        "bool send_only) -> Tensor")
def ll_combine(rows: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, handle: int,
               send_only: bool) -> torch.Tensor:
    """rows [L, R*M, H], or [R, M, H] without weights, to sums [T, H]."""
    return _with_ids(handle, topk_idx).combine(rows, topk_weights, send_only=send_only)


@ll_combine.register_fake
def _(rows: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, handle: int,
      send_only: bool) -> torch.Tensor:
    return rows.new_empty((topk_idx.shape[0], rows.shape[-1]))


@define("ll_complete(Tensor(a!)[] outputs, Tensor[] inputs, SymInt handle) -> ()", ("outputs",))
def ll_complete(outputs: list[torch.Tensor], inputs: list[torch.Tensor], handle: int) -> None:
    """Receives what the staged operation has sent; `outputs` are its results, `inputs` what it got, which a compiler
    would otherwise take for memory that is free again: a combine applies its weights as it receives.

    A compiler may have copied these since, so what is received is copied, too. Under a mode they are the
    handle's own, which has none then.
    """
    of_handle: EpHandle = find("handle", handle)
    received = of_handle.staged_outputs
    of_handle.complete()
    for out, arrived in zip(outputs if received else (), received, strict=True):
        if out.data_ptr() != arrived.data_ptr():
            out.copy_(arrived)


@ll_complete.register_fake
def _(outputs: list[torch.Tensor], inputs: list[torch.Tensor], handle: int) -> None:
    return None


def _with_ids(number: int, topk_idx: torch.Tensor) -> EpHandle:
    """The handle, with these ids."""
    handle: EpHandle = find("handle", number)
    if topk_idx.data_ptr() != handle.topk_idx.data_ptr():
        # Ids made in inference mode can be written to in it only, others also there.
        with torch.inference_mode():
            handle.topk_idx.copy_(topk_idx)
    return handle
