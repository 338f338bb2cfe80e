"""`EPAll2AllLayer` in code that is traced: its methods by operators."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from nccl_ep.layers.layout import EPAllToAllLayoutDesc
from nccl_ep.layers.operators import layer_combine, layer_dispatch, layer_dispatch_scaled
from nccl_ep.layers.scaled import Scaling
from nccl_ep.operators import numbers
from nccl_ep.operators.traced import runs_now

if TYPE_CHECKING:
    from nccl_ep.layers.ep_a2a import EPAll2AllLayer


def dispatch(layer: EPAll2AllLayer, input: torch.Tensor, exp_indices: torch.Tensor,
             weight: torch.Tensor | None, scaling: Scaling, small: bool,
             ) -> tuple[torch.Tensor, torch.Tensor | None, EPAllToAllLayoutDesc]:
    """`EPAll2AllLayer.dispatch`, by low latency if the batch is `small`."""
    row_scales = None
    if scaling.scales is None and scaling.cast is None:
        rows, weights, counts, ticket = layer_dispatch(input, exp_indices, weight, layer.number,
                                                       small)
    else:
        rows, row_scales, weights, counts, ticket = layer_dispatch_scaled(
            input, scaling.scales, exp_indices, weight, scaling.cast, scaling.order, layer.number,
            small)
    weights = None if weight is None else weights
    if runs_now(ticket):
        real: EPAllToAllLayoutDesc = numbers.of_ticket("layout", ticket)
        return rows, weights, dataclasses.replace(real, scales=row_scales, ticket=ticket)
    layout = EPAllToAllLayoutDesc(
        num_dispatch_token_cur_rank=rows.shape[0],
        ids=exp_indices.to(torch.int32), num_recv_tokens_per_expert=counts,
        num_recv_tokens_per_expert_list=[], scales=row_scales, ticket=ticket)
    return rows, weights, layout


def combine(layer: EPAll2AllLayer, input: torch.Tensor,
            layout: EPAllToAllLayoutDesc) -> torch.Tensor:
    """`EPAll2AllLayer.combine` of such a dispatch, here or later, or under a dispatch mode of one without."""
    ticket = layout.ticket
    if ticket is None and runs_now(input):
        # Not kept in the layout, which would then keep itself.
        ticket = numbers.ticket(layout, numbers.register_for_life(layout))
    if ticket is None:
        raise ValueError("layout_desc: its dispatch was not traced, and this combine is; trace both "
                         "or none")
    sums: torch.Tensor = layer_combine(input, layout.ids, ticket, layer.number)
    return sums
