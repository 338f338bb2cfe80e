"""Small batches of `EPAll2AllLayer` by low latency: no exchange of the routing, no wait of the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from nccl_ep.group import EpGroup
from nccl_ep.handle_pool import Pool, Slot
from nccl_ep.layers.layout import EPConfig
from nccl_ep.layers.scaled import Scaling
from nccl_ep.results import DispatchResult
from nccl_ep.runtime import Use, kept


@dataclasses.dataclass
class Exchange:
    """A dispatch: its handle, and the ids and weights [T, K] of its tokens."""

    slot: Slot
    ids: torch.Tensor
    weights: torch.Tensor


class Latency:
    """A group of low latency and its handles; all ranks call alike.

    A stream waits for operations on others. Replays of graphs are not seen: between a dispatch outside of graphs and
    its combine none may run that was captured over the same handle.
    """

    def __init__(self, group: EpGroup[Any], config: EPConfig, is_one_node: bool) -> None:
        self.group, self._config = group, config
        self._pool = Pool(group, is_one_node)
        self._order = Use(group.device)
        # A multiple of 16 bytes, for what `_copies` puts behind it.
        self._ones = torch.ones(-(-self.rows // 8) * 8, dtype=config.weight_dtype, device=group.device)

    @property
    def rows_per_expert(self) -> int:
        """R*M."""
        return self.group.world_size * self.group.max_tokens_per_rank

    @property
    def rows(self) -> int:
        """L * R*M: those of a dispatch."""
        return self.rows_per_expert * self._config.num_experts_per_rank

    def dispatch(self, input: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
                 scaling: Scaling) -> tuple[DispatchResult, torch.Tensor, Exchange]:
        """tokens [T, H] of at most M to rows [L, R*M, H] and their weights, all 1; those of the tokens, float32 [T, K],
        are of combine."""
        # The caller may change its ids and weights before that.
        ones, ids, weights = _copies(self._ones, ids, weights)
        slot = Slot(self._pool, ids, "layout_desc")
        try:
            with self._order:
                slot.route(ids)
                scales = None if scaling.scales is None else slot.padded(scaling.scales)
                received = slot.handle.dispatch(slot.padded(input), scales=scales, cast=scaling.cast,
                                                 scales_order=scaling.order)
        except BaseException:
            slot.release()
            raise
        return received, ones[:self.rows], Exchange(slot, ids, weights)

    def combine(self, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """rows [L * R*M, H] to weighted sums [T, H], of the layer's dtype."""
        slot = exchange.slot
        shape = (self._config.num_experts_per_rank, self.rows_per_expert, rows.shape[1])
        handle = slot.handle
        with slot.held(), self._order:
            # The ids are in the same memory.
            weights = slot.padded(kept(exchange.weights))
            sums = handle.combine(rows.to(self._config.token_dtype).view(shape), weights)
        slot.release()
        return sums[:slot.tokens]

    def close(self) -> None:
        """Releases everything; collective."""
        self._pool.close()
        self.group.close()


def _copies(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """By one kernel, as a launch takes longer than its copy. Dense tensors; each begins at a multiple of its elements'
    size behind those before."""
    together = torch.cat([each.view(-1).view(torch.uint8) for each in tensors])
    parts = together.split([each.nbytes for each in tensors])
    return [part.view(each.dtype).view(each.shape) for part, each in zip(parts, tensors)]
