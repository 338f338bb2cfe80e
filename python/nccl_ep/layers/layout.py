"""Plain data that describes an `EPAll2AllLayer` and one of its exchanges."""

from __future__ import annotations

import dataclasses
import functools

from typing import TYPE_CHECKING

import torch

from nccl_ep.arguments import LARGEST, integer, require_dtype
from nccl_ep.group import ROW_TYPES
from nccl_ep.handle import EpHandle
from nccl_ep.runtime import kept

if TYPE_CHECKING:
    from nccl_ep.layers.latency import Exchange
    from nccl_ep.layers.scatter import Destinations


@dataclasses.dataclass(frozen=True)
class EPConfig:
    """The shape of a layer; the same on every rank except for `rank`, and for `local_world_size`
    where nodes are unequal."""

    max_tokens: int
    hidden: int
    topk: int
    num_experts: int
    rank: int
    world_size: int
    local_world_size: int
    token_dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.float32
    offset_dtype: torch.dtype = torch.int32

    def __post_init__(self) -> None:
        for name in ("max_tokens", "hidden", "topk", "num_experts", "rank", "world_size",
                     "local_world_size"):
            integer(name, getattr(self, name), least=-LARGEST)
        require_dtype("token_dtype", self.token_dtype, ROW_TYPES)
        require_dtype("weight_dtype", self.weight_dtype, (*ROW_TYPES, torch.float64))
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank: {self.rank} is none of world_size, {self.world_size}")
        check_experts("num_experts", self.num_experts, self.world_size)
        if not 1 <= self.local_world_size <= self.world_size:
            raise ValueError(f"local_world_size: must be 1 to {self.world_size}, but is "
                             f"{self.local_world_size}")
        for name in ("max_tokens", "hidden", "topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be positive, not {getattr(self, name)}")

    @property
    def num_experts_per_rank(self) -> int:
        """L."""
        return self.num_experts // self.world_size

    @property
    def is_intra_node(self) -> bool:
        """Whether all ranks are on one node."""
        return self.local_world_size == self.world_size


def check_experts(name: str, experts: int, world_size: int) -> None:
    """Raises unless the number of all experts, an argument called `name`, suits the ranks."""
    size = integer("world_size", world_size, least=-LARGEST)
    if integer(name, experts, least=-LARGEST) < 1 or experts % max(size, 1):
        raise ValueError(f"{name}: {experts} is no multiple of world_size, {world_size}")


@dataclasses.dataclass
class Expansion:
    """Between received tokens and rows by expert, on the rank of the experts. Made on the stream of a dispatch; others
    than that take each tensor by `kept`.

    pair int64 [P]: each row's place in the C first columns of [n, K], flat. slots int32 [n, C]: the
    row of each place, -1 where there is none.
    """

    pair: torch.Tensor
    slots: torch.Tensor

    @property
    def num_rows(self) -> int:
        """P."""
        return self.pair.shape[0]

    @functools.cached_property
    def source(self) -> torch.Tensor:
        """int64 [P]: the received token of each row."""
        return kept(self.pair) // max(self.slots.shape[1], 1)

    @functools.cached_property
    def bags(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [P]: all rows, grouped by token; int64 [n + 1]: where each group begins."""
        ends = (kept(self.slots) >= 0).sum(dim=1).cumsum(dim=0)
        offsets = torch.cat([ends.new_zeros(1), ends])
        among_tokens = offsets[kept(self.source)] + kept(self.pair) % max(self.slots.shape[1], 1)
        number = torch.arange(self.num_rows, device=self.pair.device)
        return torch.empty_like(number).scatter_(0, among_tokens, number), offsets


@dataclasses.dataclass
class EPAllToAllLayoutDesc:
    """Results of `dispatch` that `combine` needs, and facts for the experts.

    num_dispatch_token_cur_rank  rows of dispatch's output: (token, expert) pairs of this rank's
                                 experts
    num_input_tokens_per_rank    int32 [R]: tokens that each rank passed to dispatch
    topk_indices_tensor          int32 [T, K]: the experts of this rank's tokens, as passed
    token_dst_scatter_idx        int32 [T, K]: the row of each pair in the output of dispatch on the
                                 rank of its expert; -1 for ids that take no part, and for all but
                                 the last of those that a token repeats
    num_recv_tokens_per_expert   int32 [L]: rows of each local expert; of low latency those of its
                                 R*M rows, the first, that are tokens
    num_recv_tokens_per_expert_list  the same on the host, where it is known without waiting; of low
                                 latency R*M for each expert, in traced code empty
    send_reqs_for_nodes, send_reqs_recv_tensor, skipped_token_mapping_indices,
    skipped_token_topk_mapping_indices: None; the library exchanges these itself between nodes
    scales                       [recv_tokens, S]: those of dispatch's output, if it has any; of low
                                 latency by columns [L, R*M, S]
    """

    num_dispatch_token_cur_rank: int
    ids: torch.Tensor = dataclasses.field(repr=False)
    num_recv_tokens_per_expert: torch.Tensor
    num_recv_tokens_per_expert_list: list[int]
    send_reqs_for_nodes: torch.Tensor | None = None
    send_reqs_recv_tensor: torch.Tensor | None = None
    skipped_token_mapping_indices: torch.Tensor | None = None
    skipped_token_topk_mapping_indices: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    # The routing itself, for `combine` and for rarely used results.
    handle: EpHandle | None = dataclasses.field(default=None, repr=False)
    expansion: Expansion | None = dataclasses.field(default=None, repr=False)
    destinations: Destinations | None = dataclasses.field(default=None, repr=False)
    # Of low latency, and in traced code, instead of these.
    exchange: Exchange | None = dataclasses.field(default=None, repr=False)
    ticket: torch.Tensor | None = dataclasses.field(default=None, repr=False)

    @property
    def topk_indices_tensor(self) -> torch.Tensor:
        """See above."""
        # Low latency has the ids as int64, in memory of its own.
        return (self.ids if self.exchange is None else kept(self.ids)).to(torch.int32)

    @functools.cached_property
    def num_input_tokens_per_rank(self) -> torch.Tensor:
        """See above; computed on demand, without an exchange."""
        return self._destinations().counts.tokens

    @functools.cached_property
    def token_dst_scatter_idx(self) -> torch.Tensor:
        """See above; computed on demand, without an exchange."""
        destinations = self._destinations()
        return destinations.rows.to(destinations.config.offset_dtype)

    def _destinations(self) -> Destinations:
        if self.destinations is None:
            raise ValueError("layout_desc: of a dispatch of low latency, in traced code, or not made "
                             "by dispatch; it has no rows of pairs")
        return self.destinations
