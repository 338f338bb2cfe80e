"""Layers for MoE models, on top of `EpGroup`."""

from nccl_ep.layers.ep_a2a import EPAll2AllLayer
from nccl_ep.layers.layout import EPAllToAllLayoutDesc, EPConfig

__all__ = ["EPAll2AllLayer", "EPAllToAllLayoutDesc", "EPConfig"]
