"""`ElasticBuffer`: DeepEP V2's object, over high-throughput groups of this library."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, NoReturn

import torch

from nccl_ep.arguments import integer
from nccl_ep.deep_ep import high_throughput
from nccl_ep.deep_ep.events import EventHandle, EventOverlap
from nccl_ep.deep_ep.high_throughput import Routing, on_sms
from nccl_ep.deep_ep.shared import NotServed, Sharing
from nccl_ep.gradients import without_gradients
from nccl_ep.group import EpGroup
from nccl_ep.handle import EpHandle
from nccl_ep.runtime import HostCopy
from nccl_ep.scales import ScalesOrder
from nccl_ep.tensors import checked_output

_Pair = tuple[torch.Tensor, torch.Tensor]
_SMS = 24  # that high throughput takes if nobody says otherwise
_TOKENS = 1 << 17  # of all ranks together, if expanded rows have no bound
# Bounds of groups: engines bring another M with each size of a batch, and a handle in a CUDA graph keeps memory for all
# tokens of its group's bound.
LEAST_BOUND = 512
_BOUND_STEP = 16
MOST_ROWS = 1 << 20  # of all ranks together, with which a group still has room for rows by expert
_STEP = 2 << 20  # DeepEP rounds sizes up to this


@dataclasses.dataclass(eq=False)
class EPHandle:
    """What `ElasticBuffer.dispatch` returns: one routing, for cached dispatches and `combine`.

    psum_num_recv_tokens_per_expert        int32 [L]: where the rows of each expert end, those before it padded to the
                                           alignment and, if not expanded, its own, too
    psum_num_recv_tokens_per_scaleup_rank  int32 [1]: the number of received tokens. DeepEP has one for each source
    num_unaligned_recv_tokens_per_expert   int32 [L]
    num_recv_tokens, num_expanded_tokens   rows; without a wait of the host those that tensors have

    If expanded, the number of tokens that the rows are of is unknown: the second and `num_recv_tokens` are None.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int | None
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor | None
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    routing: Routing = dataclasses.field(repr=False)

    @property
    def recv_src_metadata(self) -> NoReturn:
        """Not served."""
        raise NotServed("recv_src_metadata: rows come in the order of source rank and token, and nothing tells where "
                        "each is from")


class ElasticBuffer(Sharing):
    """Dispatch and combine on the ranks of `group`, a torch.distributed group of any backend;
    constructing one is collective, and so is `destroy`.

    Sizes, queue pairs, service levels, time limits and modes of a network are accepted and unused, and results never
    depend on the order in which rows arrive.
    """

    def __init__(self, group: Any, num_bytes: int | None = None, num_cpu_bytes: int = 0,
                 num_max_tokens_per_rank: int = 0, hidden: int = 0, num_topk: int = 0, use_fp8_dispatch: bool = False,
                 deterministic: bool = False, allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
                 prefer_overlap_with_compute: bool = True, sl_idx: int = 3, num_allocated_qps: int = 0,
                 num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100,
                 explicitly_destroy: bool = False) -> None:
        if num_cpu_bytes:
            raise NotImplementedError("num_cpu_bytes: there is no memory of the host")
        self.num_max_tokens_per_rank = integer("num_max_tokens_per_rank", num_max_tokens_per_rank)
        hidden = integer("hidden", hidden)
        super().__init__(group, explicitly_destroy)  # which only `destroy` takes back
        self.rank_idx, self.num_ranks = self.shared.rank, self.shared.size
        self.num_bytes = num_bytes or _size(self.num_ranks, self.num_max_tokens_per_rank, hidden)
        self.deterministic = deterministic
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute, self.num_allocated_qps = prefer_overlap_with_compute, num_allocated_qps
        # To callers the ranks are one domain, over several nodes, too.
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx

    @staticmethod
    def get_buffer_size_hint(group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0,
                             use_fp8_dispatch: bool = False, allow_hybrid_mode: bool = True,
                             allow_multiple_reduction: bool = True) -> int:
        """Bytes of the rows that may come; the library needs no `num_bytes`."""
        return _size(torch.distributed.get_world_size(group), num_max_tokens_per_rank, hidden)

    @staticmethod
    def capture() -> EventHandle:
        """An event at this point of the current stream."""
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """1 and all ranks."""
        return 1, self.num_ranks

    get_logical_domain_size = get_physical_domain_size

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *args: Any, **kwargs: Any) -> int:
        """SMs of an operation that names none."""
        return _SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """0: the library has no queue pairs of its own."""
        return 0

    def __getattr__(self, name: str) -> Any:
        absent = ("engram_", "pp_", "agrs_", "all_gather", "create_agrs", "destroy_agrs")
        if name == "barrier" or name.startswith(absent):
            raise NotServed(f"{name}: this library has dispatch and combine alone")
        raise AttributeError(name)

    @without_gradients
    def dispatch(self, x: torch.Tensor | _Pair, topk_idx: torch.Tensor | None = None,
                 topk_weights: torch.Tensor | None = None,
                 cumulative_local_expert_recv_stats: torch.Tensor | None = None, num_experts: int | None = None,
                 num_max_tokens_per_rank: int | None = None, expert_alignment: int | None = None, num_sms: int = 0,
                 num_qps: int = 0, previous_event: EventHandle | None = None,
                 previous_event_before_epilogue: EventHandle | None = None, async_with_compute_stream: bool = False,
                 allocate_on_comm_stream: bool = False, handle: EPHandle | None = None, do_handle_copy: bool = True,
                 do_cpu_sync: bool | None = None, do_expand: bool = False, do_zero_padding: bool = False,
                 use_tma_aligned_col_major_sf: bool = False) -> tuple[Any, ...]:
        """x [T, H], or with scales [T, S], to rows (and scales), ids, weights, a handle and an event.

        Rows [n, H] by source rank and token with local ids int64 and weights float32 [n, K], or with `do_expand` [P, H]
        by expert, no ids, and weights [P]. Without `do_cpu_sync` there are as many as may come, and a routing with
        `handle` can be captured.
        """
        tokens, scales = x if isinstance(x, (tuple, list)) else (x, None)
        order: ScalesOrder = "column" if use_tma_aligned_col_major_sf else "row"
        options: dict[str, Any] = {"scales": scales, "scales_order": order, "choice": on_sms(num_sms)}
        plan, weights = None, topk_weights
        if handle is not None:
            _check_cached(handle, topk_idx=topk_idx, num_experts=num_experts, expert_alignment=expert_alignment,
                          num_max_tokens_per_rank=num_max_tokens_per_rank, do_cpu_sync=do_cpu_sync or None,
                          do_expand=do_expand or None)
        else:
            most = integer("num_max_tokens_per_rank", num_max_tokens_per_rank or self.num_max_tokens_per_rank)
            alignment = integer("expert_alignment", expert_alignment or 1, 1)
            plan = _Plan(do_expand, do_cpu_sync in (None, True), alignment, most, num_sms or _SMS)
            group, host = self._group(tokens, scales, topk_idx, num_experts, plan)
        if cumulative_local_expert_recv_stats is not None:
            of_group = group if handle is None else handle.routing.handle.group
            checked_output("cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats,
                           (of_group.num_local_experts,), of_group.device, torch.int32)
        used = [tokens, scales, topk_idx, topk_weights, cumulative_local_expert_recv_stats]
        if handle is not None:
            used.append(handle.num_unaligned_recv_tokens_per_expert)
        with self._comm.on(previous_event, used, async_with_compute_stream) as beside:
            _wait(previous_event_before_epilogue)
            if plan is not None:
                assert topk_idx is not None
                given = high_throughput.Given(tokens, scales, topk_idx, topk_weights)
                handle = plan.handle(*high_throughput.routed(group, host, given, plan.zones), host)
                if weights is None and not do_expand:  # ids come with weights
                    weights = torch.zeros(topk_idx.shape, dtype=torch.float32, device=group.device)
            assert handle is not None
            result = high_throughput.cached_dispatch(handle.routing, tokens, weights, do_zero_padding, **options)
            if plan is not None and result.topk_idx is not None:
                came = result.topk_idx[:, :1] >= 0
                handle.psum_num_recv_tokens_per_scaleup_rank = came.sum(dim=0, dtype=torch.int32)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(handle.num_unaligned_recv_tokens_per_expert)
        if topk_weights is None:
            result = result._replace(topk_weights=None)
        event = self._comm.finish(beside, async_with_compute_stream,
                                  [*result, *(vars(handle).values() if plan else ())])
        rows = result.tokens if scales is None else (result.tokens, result.scales)
        return rows, result.topk_idx, result.topk_weights, handle, event

    def _group(self, tokens: torch.Tensor, scales: torch.Tensor | None, topk_idx: torch.Tensor | None,
               num_experts: int | None, plan: _Plan) -> tuple[EpGroup[Any], HostCopy | None]:
        """The group of a first dispatch, and host memory for counts if the host waits for them."""
        if topk_idx is None or num_experts is None:
            raise ValueError("topk_idx, num_experts: needed without a handle")
        if plan.waits and tokens.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError("do_cpu_sync: must be False in a CUDA graph, where nobody can wait for the number of rows")
        if not plan.waits and not plan.most:
            raise ValueError("num_max_tokens_per_rank: needed without do_cpu_sync")
        bound = self._bound(plan.most) if plan.expands or not plan.waits else 0
        row_bytes = high_throughput.row_bytes(tokens, scales, self.shared.device)
        if bound and len(tokens) > (plan.most or bound):
            raise ValueError(f"num_max_tokens_per_rank: is {plan.most or bound}, but x has {len(tokens)} tokens")
        group, host = self.shared.high_throughput(num_experts, row_bytes, 0, bound)
        return group, host if plan.waits else None

    def _bound(self, most: int) -> int:
        """M of a group for dispatches with this M, the same for many; at most the constructor's where that does."""
        if not most:
            return _TOKENS // self.num_ranks
        bound = LEAST_BOUND
        while bound < most:
            bound *= _BOUND_STEP
        bound = min(bound, max(most, MOST_ROWS // self.num_ranks))
        return min(bound, self.num_max_tokens_per_rank) if most <= self.num_max_tokens_per_rank else bound

    @without_gradients
    def combine(self, x: torch.Tensor, handle: EPHandle, topk_weights: torch.Tensor | None = None, bias: Any = None,
                num_sms: int = 0, num_qps: int = 0, previous_event: EventHandle | None = None,
                previous_event_before_epilogue: EventHandle | None = None, async_with_compute_stream: bool = False,
                allocate_on_comm_stream: bool = False) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """x [n, H] or [P, H] to sums [T, H], plus `bias`; weights [n, K] or [P], if given, to [T, K]; and an event."""
        if not isinstance(handle, EPHandle):
            raise TypeError(f"handle: must be what dispatch returned, not {type(handle).__name__}")
        given = bias if isinstance(bias, (tuple, list)) else (bias,)
        with self._comm.on(previous_event, [x, topk_weights, *given], async_with_compute_stream) as beside:
            _wait(previous_event_before_epilogue)
            sums, weights = high_throughput.combine(handle.routing, x, topk_weights, bias, on_sms(num_sms))
        return sums, weights, self._comm.finish(beside, async_with_compute_stream, [sums, weights])


def _size(ranks: int, tokens: int, hidden: int) -> int:
    return -(-2 * ranks * tokens * hidden // _STEP) * _STEP


def _wait(event: EventHandle | None) -> None:
    """An operation has no epilogue of its own: it waits before it begins."""
    if event is not None:
        event.current_stream_wait()


def _check_cached(handle: EPHandle, **given: Any) -> None:
    if not isinstance(handle, EPHandle):
        raise TypeError(f"handle: must be what dispatch returned, not {type(handle).__name__}")
    for name, value in given.items():
        if value is not None and (name == "topk_idx" or value != getattr(handle, name, None)):
            raise ValueError(f"{name}: must be None with a handle, or as that has it")


class _Plan(NamedTuple):
    """How a first dispatch goes: whether its rows are expanded, whether the host waits for their number, to what each
    expert's are aligned, M and SMs."""

    expands: bool
    waits: bool
    alignment: int
    most: int
    num_sms: int

    @property
    def zones(self) -> int:
        """The alignment of rows by expert, if they lie so."""
        return self.alignment if self.expands else 0

    def handle(self, routed: EpHandle[Any], counts: torch.Tensor, host: HostCopy | None) -> EPHandle:
        """Of a handle that has a routing with so many tokens of each expert, which `host` gets."""
        group, alignment = routed.group, self.alignment
        per_expert = [] if host is None else high_throughput.aligned(host.wait().tolist(), alignment)
        # In decode each small kernel counts.
        padded = counts if alignment == 1 else (counts + (alignment - 1)) // alignment * alignment
        ends = padded.cumsum(dim=0, dtype=torch.int32)
        if host is None:
            rows = group.world_size * self.most  # of the group there may come more
            expanded = group.most_slots(rows, routed.top_k, alignment)
            rows = expanded if self.expands else rows
        else:
            expanded = sum(per_expert)
            rows = expanded if self.expands else routed.num_recv_tokens
        return EPHandle(
            do_expand=self.expands, num_experts=group.num_experts, expert_alignment=alignment,
            num_max_tokens_per_rank=self.most, num_sms=self.num_sms, topk_idx=routed.topk_idx.clone(),
            num_recv_tokens=None if self.expands else rows, num_expanded_tokens=expanded,
            num_recv_tokens_per_expert_list=per_expert, psum_num_recv_tokens_per_scaleup_rank=None,
            psum_num_recv_tokens_per_expert=ends - padded + counts if self.expands and alignment > 1 else ends,
            num_unaligned_recv_tokens_per_expert=counts, routing=Routing(routed, rows))
