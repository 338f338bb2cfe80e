"""Small batches of `EPAll2AllLayer` by low latency: no exchange of the routing, no wait of the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from nccl_ep.group import EpGroup
from nccl_ep.handle import EpHandle
from nccl_ep.layers.layout import EPConfig
from nccl_ep.layers.scaled import Scaling
from nccl_ep.results import DispatchResult
from nccl_ep.routing import padded, write_ids
from nccl_ep.runtime import Use

# Dispatches whose rows can be combined: two micro-batches, and as many once more.
_SLOTS = 4


@dataclasses.dataclass
class Exchange:
    """A dispatch: its handle, how often that has been used, its T tokens and their weights [T, K]."""

    handle: EpHandle[Any]
    use: int
    tokens: int
    weights: torch.Tensor


class Latency:
    """A group of low latency, and handles that take turns; all ranks call alike.

    Handles are made at once and for M tokens, as making one over several nodes is collective, and none
    can be made while a CUDA graph is captured. Shorter batches have ids of -1 at the end.

    A stream waits for the uses of a handle on others. Replays of graphs are not seen: between a dispatch outside of
    graphs and its combine none may run that was captured over the same handle, as it writes ids there.
    """

    def __init__(self, group: EpGroup[Any], config: EPConfig) -> None:
        self.group, self._config = group, config
        shape = (group.max_tokens_per_rank, config.topk)
        with torch.inference_mode(False):
            self._handles = [group.create_handle(
                torch.full(shape, -1, dtype=torch.int64, device=group.device))
                for _ in range(_SLOTS)]
        self._uses = 0
        self._ends = {handle: Use(group.device) for handle in self._handles}

    @property
    def rows_per_expert(self) -> int:
        """R*M."""
        return self.group.world_size * self.group.max_tokens_per_rank

    def dispatch(self, input: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
                 scaling: Scaling) -> tuple[DispatchResult, Exchange]:
        """tokens [T, H] of at most M to rows [L, R*M, H]; weights float32 [T, K] are of combine."""
        handle = self._handles[self._uses % _SLOTS]
        self._uses += 1
        self._ends[handle].current_stream_wait()
        write_ids(handle.topk_idx, ids)
        scales = None if scaling.scales is None else self._padded(scaling.scales)
        received = handle.dispatch(self._padded(input), scales=scales, cast=scaling.cast,
                                   scales_order=scaling.order)
        self._ends[handle].note()
        return received, Exchange(handle, self._uses, input.shape[0], weights)

    def combine(self, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """rows [L * R*M, H] to weighted sums [T, H], of the layer's dtype."""
        if exchange.use <= self._uses - _SLOTS:
            raise ValueError(f"layout_desc: {_SLOTS} later dispatches have taken its place; combine "
                             "before that")
        shape = (self._config.num_experts_per_rank, self.rows_per_expert, rows.shape[1])
        sums = exchange.handle.combine(rows.to(self._config.token_dtype).view(shape),
                                       self._padded(exchange.weights))
        self._ends[exchange.handle].note()
        return sums[:exchange.tokens]

    def close(self) -> None:
        """Releases everything; collective."""
        for handle in self._handles:
            handle.close()
        self.group.close()

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        return padded(rows, self.group.max_tokens_per_rank)
