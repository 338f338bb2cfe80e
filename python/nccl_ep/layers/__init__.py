"""Layers for MoE models, on top of `EpGroup`."""

from nccl_ep.requirement import require_torch

require_torch("nccl_ep.layers")

from nccl_ep.layers.ep_a2a import EPAll2AllLayer
from nccl_ep.layers.layout import EPAllToAllLayoutDesc, EPConfig

__all__ = ["EPAll2AllLayer", "EPAllToAllLayoutDesc", "EPConfig"]
