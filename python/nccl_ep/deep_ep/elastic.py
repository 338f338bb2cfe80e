"""`ElasticBuffer`: DeepEP V2's object, over high-throughput groups of this library."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import torch

from nccl_ep.arguments import integer
from nccl_ep.choices import Choice
from nccl_ep.deep_ep import high_throughput
from nccl_ep.deep_ep.events import EventHandle, EventOverlap
from nccl_ep.deep_ep.expanded import PaddedExpansion, aligned_begins, most_rows, padded_expansion
from nccl_ep.deep_ep.high_throughput import First, Routing
from nccl_ep.deep_ep.shared import Sharing
from nccl_ep.group import EpGroup
from nccl_ep.layers.expand import received_rows, reduce, weight_of_row
from nccl_ep.results import DispatchResult
from nccl_ep.runtime import HostCopy
from nccl_ep.scales import ScalesOrder

_Pair = tuple[torch.Tensor, torch.Tensor]
_SMS = 24  # that high throughput takes if nobody says otherwise
_STEP = 2 << 20  # DeepEP rounds sizes up to this


@dataclasses.dataclass
class EPHandle:
    """What `ElasticBuffer.dispatch` returns: one routing, for cached dispatches and `combine`.

    psum_num_recv_tokens_per_expert        int32 [L]: where the rows of each expert end, those before it padded to the
                                           alignment and, if not expanded, its own, too
    psum_num_recv_tokens_per_scaleup_rank  int32 [1]: the number of received tokens. DeepEP has one for each source
    num_unaligned_recv_tokens_per_expert   int32 [L]
    num_recv_tokens, num_expanded_tokens   rows; without a wait of the host those that tensors have
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    routing: Routing = dataclasses.field(repr=False)
    expansion: PaddedExpansion | None = dataclasses.field(default=None, repr=False)

    @property
    def recv_src_metadata(self) -> NoReturn:
        """Not served."""
        raise NotImplementedError("recv_src_metadata: rows come in the order of source rank and token, and nothing "
                                  "tells where each is from")


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
        super().__init__(group, explicitly_destroy)
        self.rank_idx, self.num_ranks = self.shared.rank, self.shared.size
        self.num_max_tokens_per_rank = integer("num_max_tokens_per_rank", num_max_tokens_per_rank)
        self.num_bytes = num_bytes or _size(self.num_ranks, num_max_tokens_per_rank, hidden)
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
        if name == "barrier" or name.startswith(("engram_", "pp_", "agrs_", "all_gather", "create_agrs", "destroy_agrs")):
            raise NotImplementedError(f"{name}: this library has dispatch and combine alone")
        raise AttributeError(name)

    @torch.no_grad()
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
        options: dict[str, Any] = {"scales": scales, "scales_order": order, "choice": _few(num_sms)}
        group, host = None, None
        if handle is not None:
            _check_cached(handle, topk_idx=topk_idx, num_experts=num_experts, expert_alignment=expert_alignment,
                          num_max_tokens_per_rank=num_max_tokens_per_rank, do_cpu_sync=do_cpu_sync or None,
                          do_expand=do_expand or None)
        else:
            most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
            bound = 0 if do_cpu_sync in (None, True) else integer("num_max_tokens_per_rank", most, least=1)
            group, host = self._group(tokens, topk_idx, num_experts, bound)
        with self._comm.on(previous_event, [tokens, scales, topk_idx, topk_weights]):
            _wait(previous_event_before_epilogue)
            if handle is not None:
                received = high_throughput.cached_dispatch(handle.routing, tokens, topk_weights, **options)
            else:
                assert topk_idx is not None and group is not None
                weights = topk_weights
                if weights is None:  # ids come with weights
                    weights = torch.zeros(topk_idx.shape, dtype=torch.float32, device=group.device)
                first = high_throughput.first_dispatch(group, host, tokens, (topk_idx, weights), **options)
                handle = _handle(first, most, integer("expert_alignment", expert_alignment or 1, 1),
                                 (num_sms or _SMS, do_expand))
                received = first.received
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(handle.num_unaligned_recv_tokens_per_expert)
            result = received if handle.expansion is None else _by_expert(received, handle.expansion, order,
                                                                          do_zero_padding)
        if topk_weights is None:
            result = result._replace(topk_weights=None)
        event = self._comm.finish(async_with_compute_stream, result)
        rows = result.tokens if scales is None else (result.tokens, result.scales)
        return rows, result.topk_idx, result.topk_weights, handle, event

    def _group(self, tokens: torch.Tensor, topk_idx: torch.Tensor | None, num_experts: int | None,
               bound: int) -> tuple[EpGroup[Any], HostCopy | None]:
        """The group of a first dispatch, and host memory for counts if rows have no bound."""
        if topk_idx is None or num_experts is None:
            raise ValueError("topk_idx, num_experts: needed without a handle")
        if tokens.is_cuda and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError("handle: routing cannot be captured in a CUDA graph, a dispatch with one can")
        row_bytes = high_throughput.row_bytes(tokens)
        group, host = self.shared.high_throughput(num_experts, row_bytes, 0, bound)
        return group, None if bound else host

    @torch.no_grad()
    def combine(self, x: torch.Tensor, handle: EPHandle, topk_weights: torch.Tensor | None = None, bias: Any = None,
                num_sms: int = 0, num_qps: int = 0, previous_event: EventHandle | None = None,
                previous_event_before_epilogue: EventHandle | None = None, async_with_compute_stream: bool = False,
                allocate_on_comm_stream: bool = False) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """x [n, H] or [P, H] to sums [T, H], plus `bias`; weights [n, K] or [P], if given, to [T, K]; and an event."""
        if not isinstance(handle, EPHandle):
            raise TypeError(f"handle: must be what dispatch returned, not {type(handle).__name__}")
        given = bias if isinstance(bias, (tuple, list)) else (bias,)
        with self._comm.on(previous_event, [x, topk_weights, *given]):
            _wait(previous_event_before_epilogue)
            expansion = handle.expansion
            if expansion is not None:
                x = reduce(x, expansion)
                if topk_weights is not None:
                    of_token = torch.where(expansion.slots >= 0, topk_weights[expansion.slots.clamp(min=0)], 0.0)
                    more = handle.topk_idx.shape[1] - of_token.shape[1]
                    topk_weights = torch.nn.functional.pad(of_token, (0, more))
            sums, weights = high_throughput.combine(handle.routing, x, topk_weights, bias, _few(num_sms))
        return sums, weights, self._comm.finish(async_with_compute_stream, [sums, weights])


def _size(ranks: int, tokens: int, hidden: int) -> int:
    return -(-2 * ranks * tokens * hidden // _STEP) * _STEP


def _few(num_sms: int) -> Choice | None:
    return Choice(blocks=num_sms) if num_sms else None


def _wait(event: EventHandle | None) -> None:
    """An operation has no epilogue of its own: it waits before it begins."""
    if event is not None:
        event.current_stream_wait()


def _by_expert(received: DispatchResult, expansion: PaddedExpansion, order: ScalesOrder,
               zeros: bool) -> DispatchResult:
    """A row for each pair, and those between."""
    rows, scales = received_rows(received, expansion, order)
    unused = expansion.filled.logical_not()
    if zeros:
        rows.view(torch.uint8).masked_fill_(unused[:, None], 0)
    weights = received.topk_weights
    if weights is not None:
        weights = weight_of_row(weights, expansion, expansion.slots.shape[1]).masked_fill_(unused, 0.0)
    return DispatchResult(rows, topk_weights=weights, scales=scales)


def _check_cached(handle: EPHandle, **given: Any) -> None:
    if not isinstance(handle, EPHandle):
        raise TypeError(f"handle: must be what dispatch returned, not {type(handle).__name__}")
    for name, value in given.items():
        if value is not None and (name == "topk_idx" or value != getattr(handle, name, None)):
            raise ValueError(f"{name}: must be None with a handle, or as that has it")


def _handle(first: First, most: int, alignment: int, how: tuple[int, bool]) -> EPHandle:
    """Of a first dispatch, which takes so many SMs and is expanded, or not."""
    num_sms, do_expand = how
    counts, topk_idx = first.counts, first.received.topk_idx
    assert topk_idx is not None
    begins = aligned_begins(counts, alignment)
    rows, top_k = topk_idx.shape
    per_expert = high_throughput.aligned(first.per_expert, alignment)
    expanded = sum(per_expert) if per_expert else most_rows(rows, top_k, counts.shape[0], alignment)
    ends = begins[:-1] + counts if do_expand else begins[1:]
    group = first.routing.handle.group
    return EPHandle(
        do_expand=do_expand, num_experts=group.num_experts, expert_alignment=alignment, num_max_tokens_per_rank=most,
        num_sms=num_sms, topk_idx=first.routing.handle.topk_idx, num_recv_tokens=rows,
        num_expanded_tokens=expanded, num_recv_tokens_per_expert_list=per_expert,
        psum_num_recv_tokens_per_scaleup_rank=(topk_idx[:, :1] >= 0).sum(dim=0, dtype=torch.int32),
        psum_num_recv_tokens_per_expert=ends.to(torch.int32), num_unaligned_recv_tokens_per_expert=counts,
        routing=first.routing,
        expansion=padded_expansion(topk_idx, counts, alignment, expanded) if do_expand else None)
