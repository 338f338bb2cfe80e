"""`EPAll2AllLayer`: dispatch and combine with rows sorted by expert, for models in torch.

The constructor, methods and results are those of Triton-distributed's layer of this name;
underneath is the high-throughput mode of libnccl_ep. Both directions are differentiable, but for
rows with scales.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, overload

import torch
import torch.distributed as dist

from nccl_ep.arguments import cannot_be_copied, integer, require_group
from nccl_ep.autograd import ht_combine
from nccl_ep.gradients import is_transformed
from nccl_ep.group import EpGroup
from nccl_ep.handle import EpHandle
from nccl_ep.handle_pool import is_one_node
from nccl_ep.layers import expand, scaled, scatter, traced
from nccl_ep.layers.latency import Latency
from nccl_ep.layers.layout import EPAllToAllLayoutDesc, EPConfig, Expansion, check_experts
from nccl_ep.layers.rows import prepare
from nccl_ep.layers.scaled import Scaling
from nccl_ep.nccl_wrapper import NCCLLibrary
from nccl_ep.operators.numbers import register_for_life
from nccl_ep.operators.traced import is_traced
from nccl_ep.results import WeightedResult
from nccl_ep.routing import pairs_of_ids
from nccl_ep.runtime import HostCopy, Runtime
from nccl_ep.scales import CastName, ScalesOrder
from nccl_ep.tensors import checked, checked_integers
from nccl_ep.types import NCCL_EP_AUTO, ncclDataTypeEnum, ncclRedOpTypeEnum

_SMALLEST_ROW = 16  # bytes
_NUMBERS = itertools.count()  # of the layers of this process


class EPAll2AllLayer(torch.nn.Module):
    """Sends tokens to the ranks of their experts and brings the results back.

    ep_group              torch.distributed group of the ranks; None: all
    max_tokens            expected tokens of a rank; with more, buffers grow
    hidden, topk          H, K
    rank                  this rank in ep_group
    num_tot_experts       E over all ranks, a multiple of world_size
    local_world_size, world_size  ranks of this node, and of the group. The library finds the nodes
                          by itself; any ranks may be on any node
    dtype, weight_dtype   of tokens, and of the weights that dispatch returns
    num_sm                SMs that high throughput may use; 0: the library chooses. Low latency takes
                          what its few microseconds need
    enable_local_combine  no effect: results are always summed on the rank of the experts first
    use_aot               no effect: kernels are always built ahead of time
    latency_tokens        M of low latency: batches of at most so many tokens, under torch.no_grad()
                          or inference_mode and without `full_scatter_indices`, use it; 0: none
                          does. All ranks decide alike

    Constructing and `finalize` are collective. It has no parameters: `to`, `half` and the like
    leave it as it is, `state_dict` has nothing of it, and a `copy.deepcopy` shares its group, which
    the `finalize` of either closes. `label` names it in texts of failures.
    """

    def __init__(self, ep_group: Any, max_tokens: int, hidden: int, topk: int, rank: int,
                 num_tot_experts: int, local_world_size: int, world_size: int,
                 dtype: torch.dtype = torch.bfloat16, weight_dtype: torch.dtype = torch.float32,
                 num_sm: int = 20, enable_local_combine: bool = False,
                 use_aot: bool = False, *, latency_tokens: int = 0) -> None:
        super().__init__()
        check_experts("num_tot_experts", num_tot_experts, world_size)
        self.label = f"EPAll2AllLayer {next(_NUMBERS)}"
        self.ep_config = EPConfig(max_tokens=max_tokens, hidden=hidden, topk=topk,
                                  num_experts=num_tot_experts, rank=rank, world_size=world_size,
                                  local_world_size=local_world_size, token_dtype=dtype,
                                  weight_dtype=weight_dtype)
        require_group("ep_group", ep_group)
        have = dist.get_rank(ep_group), dist.get_world_size(ep_group)
        if have != (rank, world_size):
            raise ValueError(f"rank, world_size: {rank}, {world_size}, but ep_group has {have}")
        num_sm, small = integer("num_sm", num_sm), integer("latency_tokens", latency_tokens)
        self.ep_group, self.num_sm = ep_group, num_sm
        self.enable_local_combine, self.use_aot = enable_local_combine, use_aot
        # What can fail on one rank comes before the group, which only all ranks together can close.
        device = Runtime(NCCLLibrary()).device
        self._host_counts = HostCopy((self.num_experts_per_rank,), torch.int32, device)
        # Results times weights are float32 if the weights are.
        for of_rows in {dtype, torch.float32}:
            prepare(of_rows, hidden, min(topk, self.num_experts_per_rank), device)
        # A channel uses two SMs. Without a bound the group takes any number of tokens.
        channels = max(num_sm // 2, 1) if num_sm else NCCL_EP_AUTO
        self._group = EpGroup(num_tot_experts, hidden, algorithm="ht", dtype=dtype, comm=ep_group,
                              num_channels=channels)
        self._group.label = self.label
        self._latency = None
        if small:
            group = EpGroup(num_tot_experts, hidden, algorithm="ll", max_tokens_per_rank=small,
                            dtype=dtype, comm=self._group.comm)
            group.label = f"{self.label}, low latency"
            self._latency = Latency(group, self.ep_config, is_one_node(ep_group))
        self.number = self._new_number()  # of operators

    def _new_number(self) -> int:
        config = self.ep_config
        return register_for_life(self, config.num_experts_per_rank, config.hidden, config.token_dtype,
                                 config.weight_dtype, self.latency_rows)

    def forward(self, input: torch.Tensor, exp_indices: torch.Tensor, weight: torch.Tensor | None,
                experts: Callable[[torch.Tensor, EPAllToAllLayoutDesc], torch.Tensor],
                ) -> torch.Tensor:
        """There and back: `dispatch`, `experts(rows, layout)`, their rows times the weights,
        `combine`."""
        rows, weights, layout = self.dispatch(input, exp_indices, weight)
        results = experts(rows, layout)
        return self.combine(results if weights is None else results * weights[:, None], layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> EPAll2AllLayer:
        """A layer of its own over the same group: only all ranks together could make another."""
        for shared in (self._group, self.ep_group, self._host_counts, self._latency):
            memo[id(shared)] = shared
        same = self.__copy__()
        memo[id(self)] = same
        same.__dict__ = copy.deepcopy(self.__dict__, memo)
        same.number = same._new_number()
        return same

    def __copy__(self) -> EPAll2AllLayer:
        same = type(self).__new__(type(self))
        same.__dict__.update(self.__dict__)
        same.number = same._new_number()
        return same

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        cannot_be_copied(self, "save model.state_dict(), and make the layer anew on every rank")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor],
               recurse: bool = True) -> EPAll2AllLayer:
        """Of `to` and the like: says so if others now expect another type of this layer."""
        dtype = self.ep_config.token_dtype
        if (after := fn(torch.empty(0, dtype=dtype)).dtype) != dtype:
            warnings.warn(f"{self.label} still takes {dtype}, not {after}; make it with "
                          f"dtype={after}", stacklevel=3)
        super()._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        """What torch prints between the parentheses."""
        config = self.ep_config
        return (f"{self.label}, rank {config.rank} of {config.world_size}, {config.num_experts} experts, "
                f"hidden {config.hidden} {config.token_dtype}, top-{config.topk}")

    @property
    def num_experts_per_rank(self) -> int:
        """L."""
        return self.ep_config.num_experts_per_rank

    @overload
    def dispatch(self, input: torch.Tensor, exp_indices: torch.Tensor, weight: torch.Tensor,
                 full_scatter_indices: torch.Tensor | None = None, *,
                 scales: torch.Tensor | None = None, cast: CastName | None = None,
                 scales_order: ScalesOrder = "row",
                 ) -> tuple[torch.Tensor, torch.Tensor, EPAllToAllLayoutDesc]: ...

    @overload
    def dispatch(self, input: torch.Tensor, exp_indices: torch.Tensor, weight: None = None,
                 full_scatter_indices: torch.Tensor | None = None, *,
                 scales: torch.Tensor | None = None, cast: CastName | None = None,
                 scales_order: ScalesOrder = "row",
                 ) -> tuple[torch.Tensor, None, EPAllToAllLayoutDesc]: ...

    def dispatch(self, input: torch.Tensor, exp_indices: torch.Tensor,
                 weight: torch.Tensor | None = None,
                 full_scatter_indices: torch.Tensor | None = None, *,
                 scales: torch.Tensor | None = None, cast: CastName | None = None,
                 scales_order: ScalesOrder = "row",
                 ) -> tuple[torch.Tensor, torch.Tensor | None, EPAllToAllLayoutDesc]:
        """Sends `input` [T, H] of the layer's dtype to the experts `exp_indices`, some integers
        [T, K], with `weight` [T, K].

        Returns the rows [recv_tokens, H] of this rank's experts, sorted by expert, then by source
        rank and token, one for each (token, expert) pair; their weights [recv_tokens], or None; and
        what `combine` needs. T may differ between ranks. Ids outside 0..E-1 take no part. An expert
        that a token names twice is one pair, with the sum of the weights.

        `full_scatter_indices` [T, K] or [sum of T, K]: the number of each pair among the pairs of
        all ranks sorted by expert; rows then have this order. Collective.

        `scales`, `cast` and `scales_order` are those of `EpHandle.dispatch`: rows of any type with
        their `scales` [T, S], or rows that `cast` rounds to float8_e4m3fn. The scales of the rows
        returned are `layout.scales` [recv_tokens, S]. Such rows have no gradients.

        Of at most `latency_tokens` tokens, under torch.no_grad() or inference_mode, the rows are
        [L * R*M, H], R*M for each expert, of which the first `layout.num_recv_tokens_per_expert` are
        tokens; their weights are 1, as combine applies those that were passed. The host waits for
        nothing.
        """
        scaling = Scaling(scales, cast, scales_order)
        small = full_scatter_indices is None and self._is_small(input)
        if is_traced():
            if full_scatter_indices is not None:
                raise ValueError("full_scatter_indices: must be None in code that is traced")
            return traced.dispatch(self, input, exp_indices, weight, scaling, small)
        if is_transformed():
            raise RuntimeError("dispatch: torch.func cannot transform a layer; use a handle of EpGroup.create_handle")
        if small:
            return self.dispatch_small(input, exp_indices, weight, scaling)
        return self.dispatch_large(input, exp_indices, weight, scaling, full_scatter_indices)

    def dispatch_large(self, input: torch.Tensor, exp_indices: torch.Tensor,
                       weight: torch.Tensor | None, scaling: Scaling,
                       full_scatter_indices: torch.Tensor | None = None,
                       ) -> tuple[torch.Tensor, torch.Tensor | None, EPAllToAllLayoutDesc]:
        """`dispatch` by high throughput."""
        config = self.ep_config
        # All refusals come before the exchange of the routing, in which other ranks would wait.
        input, scales = scaled.checked_rows(input, scaling, config, self._group.device)
        ids, factors, given = self._checked_routing(input.shape[0], exp_indices, weight,
                                                    full_scatter_indices)
        scaled.refuse_gradients(scaling, input, weight)
        # The host must wait for the exchange of the routing. So it comes first, and the dispatch of
        # the tokens before everything that can follow it.
        rows_per_expert = torch.empty(config.num_experts_per_rank, dtype=torch.int32,
                                      device=self._group.device)
        handle = self._group.create_handle(ids, counts=rows_per_expert)
        self._host_counts.start(rows_per_expert)
        ids = pairs_of_ids(handle.topk_idx, config.num_experts)
        received = handle.dispatch(input, factors, scales=scales, cast=scaling.cast)
        on_host = self._host_counts.wait().tolist()
        counts = destinations = positions = None
        if given is not None:
            counts = self.count_pairs(ids)
            destinations = scatter.given_positions(given, ids, counts, config)
            positions = self._send_positions(handle, destinations)
        expansion = expand.by_expert(received.topk_idx, sum(on_host), config.num_experts_per_rank,
                                     positions)
        output, row_scales = expand.received_rows(received, expansion, scaling.order)
        weights = None if weight is None else self._weights_of_rows(received, expansion)
        layout = EPAllToAllLayoutDesc(
            num_dispatch_token_cur_rank=output.shape[0],
            # The caller may change its own in place.
            ids=exp_indices.to(torch.int32, copy=True),
            num_recv_tokens_per_expert=rows_per_expert,
            num_recv_tokens_per_expert_list=on_host,
            scales=row_scales, handle=handle, expansion=expansion,
            destinations=scatter.Destinations(ids, counts or self.count_pairs(ids), config,
                                              destinations))
        return output, weights, layout

    def dispatch_small(self, input: torch.Tensor, exp_indices: torch.Tensor,
                       weight: torch.Tensor | None, scaling: Scaling,
                       ) -> tuple[torch.Tensor, torch.Tensor | None, EPAllToAllLayoutDesc]:
        """`dispatch` by low latency."""
        latency = self._latency
        assert latency is not None
        input, scales = scaled.checked_rows(input, scaling, self.ep_config, self._group.device)
        ids, factors, _ = self._checked_routing(input.shape[0], exp_indices, weight, None)
        received, ones, exchange = latency.dispatch(input, ids, factors, scaling._replace(scales=scales))
        assert received.counts is not None
        rows, row_scales = received.tokens.flatten(0, 1), received.scales
        if row_scales is not None and scaling.order == "row":
            row_scales = row_scales.flatten(0, 1)
        return rows, None if weight is None else ones, EPAllToAllLayoutDesc(
            num_dispatch_token_cur_rank=rows.shape[0],
            ids=exchange.ids,
            num_recv_tokens_per_expert=received.counts,
            num_recv_tokens_per_expert_list=[latency.rows_per_expert] * self.num_experts_per_rank,
            scales=row_scales, exchange=exchange)

    @property
    def latency_rows(self) -> int:
        """L * R*M: rows of a dispatch of low latency; 0 if there is none."""
        return 0 if self._latency is None else self._latency.rows

    def combine(self, input: torch.Tensor, layout_desc: EPAllToAllLayoutDesc) -> torch.Tensor:
        """For each token the sum over its experts of `input` [recv_tokens, H]: [T, H].

        `input` may have a wider type than the layer's dtype; the result has the layer's. Weights
        are not applied here: experts multiply by those that dispatch returned. Collective.
        """
        if not isinstance(layout_desc, EPAllToAllLayoutDesc):
            raise TypeError("layout_desc: must be what dispatch returned, not "
                            f"{type(layout_desc).__name__}")
        if layout_desc.ticket is not None or is_traced():
            return traced.combine(self, input, layout_desc)
        rows = layout_desc.num_dispatch_token_cur_rank
        input = checked("input", input, (rows, "H"), self._group.device)
        if input.dtype.itemsize == 1:
            raise ValueError(f"input: has type {input.dtype}; rows are summed without scales, so "
                             "multiply them by theirs first")
        if layout_desc.exchange is not None and self._latency is not None:
            return self._latency.combine(input, layout_desc.exchange)
        if layout_desc.handle is None or layout_desc.expansion is None:
            raise ValueError("layout_desc: not made by dispatch")
        # Sums are in float32; rows travel in the layer's dtype.
        sums = expand.reduce(input, layout_desc.expansion).to(self.ep_config.token_dtype)
        return ht_combine(layout_desc.handle, sums)

    def ep_barrier_all(self, stream: Any = None, intra_node_only: bool = False) -> None:
        """Makes `stream` wait until the streams of all ranks reach this point; collective.

        On the CPU the ranks themselves wait. `intra_node_only` makes no difference: the ranks of
        other nodes are waited for, too.
        """
        if self._group.device.type == "cpu":
            dist.barrier(group=self.ep_group)
            return
        with torch.cuda.stream(stream):
            self._sum_over_ranks(torch.zeros(1, dtype=torch.int32, device=self._group.device))

    def count_pairs(self, ids: torch.Tensor) -> scatter.Counts:
        """Pairs per rank and expert; `ids` [T, K] are 0..E, where E means none. Collective."""
        table = scatter.own_pairs(ids, self.ep_config)
        self._sum_over_ranks(table)
        return scatter.Counts(table, self.ep_config)

    def finalize(self) -> None:
        """Releases everything; collective. Layouts cannot be combined afterwards."""
        if self._latency is not None:
            self._latency.close()
        self._group.close()

    def _is_small(self, input: torch.Tensor) -> bool:
        """Whether low latency has room for these tokens, and no gradient can be wanted of it, also by
        the experts' parameters."""
        latency = self._latency
        # What is no matrix is refused later.
        return (latency is not None and not torch.is_grad_enabled() and isinstance(input, torch.Tensor)
                and input.dim() == 2 and input.shape[0] <= latency.group.max_tokens_per_rank)

    def _checked_routing(
            self, tokens: int, exp_indices: torch.Tensor, weight: torch.Tensor | None,
            full: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Ids int64, weights float32 (ones if there are none) and `full_scatter_indices` int64."""
        device, shape = self._group.device, (tokens, self.ep_config.topk)
        ids = checked_integers("exp_indices", exp_indices, shape, device)
        factors = (torch.ones(shape, dtype=torch.float32, device=device) if weight is None
                   else checked("weight", weight, shape, device).to(torch.float32))
        if full is not None:
            full = checked_integers("full_scatter_indices", full, ("rows", shape[1]), device)
        return ids, factors, full

    def _weights_of_rows(self, received: WeightedResult, expansion: Expansion) -> torch.Tensor:
        weights = expand.weight_of_row(received.topk_weights, expansion, self.num_experts_per_rank)
        return weights.to(self.ep_config.weight_dtype)

    def _sum_over_ranks(self, numbers: torch.Tensor) -> None:
        """In place, int32; on GPUs enqueued on the current stream, so the host does not wait."""
        group = self._group
        if group.device.type == "cpu":
            dist.all_reduce(numbers, group=self.ep_group)
            return
        with group.runtime.current():
            group.library.ncclAllReduce(numbers, numbers, numbers.numel(),
                                        ncclDataTypeEnum.ncclInt32, ncclRedOpTypeEnum.ncclSum,
                                        group.comm, group.runtime.stream(None))

    def _send_positions(self, handle: EpHandle, positions: torch.Tensor) -> torch.Tensor:
        """Sends the row of each pair from its home to the rank of its expert: int64 [n, K].

        They travel as the weights of a second dispatch, whose tokens are as short as possible.
        """
        tokens = torch.empty((positions.shape[0], _SMALLEST_ROW), dtype=torch.uint8,
                             device=positions.device).view(torch.float32)
        # A repeated id has its position once, and adds nothing for the others.
        received = handle.dispatch(tokens, positions.clamp(min=0).to(torch.float32))
        return received.topk_weights.to(torch.int64)
