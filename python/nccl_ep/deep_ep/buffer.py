"""`Buffer`: DeepEP's object, over groups of this library that are made when they are needed."""

from __future__ import annotations

from typing import Any

import torch

from nccl_ep.arguments import integer, require_tensor
from nccl_ep.deep_ep import high_throughput, low_latency
from nccl_ep.deep_ep.events import EventHandle, EventOverlap
from nccl_ep.deep_ep.layout import layout
from nccl_ep.deep_ep.low_latency import Hook, LowLatencyHandle, Timing
from nccl_ep.deep_ep.shared import Sharing
from nccl_ep.gradients import without_gradients
from nccl_ep.tensors import checked_integers

_Pair = tuple[torch.Tensor, torch.Tensor]
_RINGS = 32 << 20  # bytes of a high-throughput group that its ranks share
_SLOT = 320  # bytes beside a row of low latency, at most


class Config:
    """Accepted wherever DeepEP takes one; this library chooses chunks by itself.

    That of the first dispatch bounds the SMs of its group, which all others of such a size use, too.
    """

    def __init__(self, num_sms: int = 20, num_max_nvl_chunked_send_tokens: int = 6,
                 num_max_nvl_chunked_recv_tokens: int = 256,
                 num_max_rdma_chunked_send_tokens: int = 6,
                 num_max_rdma_chunked_recv_tokens: int = 256) -> None:
        self.num_sms = max(integer("num_sms", num_sms, least=1), 2)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes that a group of this library shares on its node; it needs no `num_nvl_bytes`."""
        return _RINGS

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: this library sizes what it needs on the network."""
        return 0


class Buffer(Sharing):
    """Dispatch and combine of both modes on the ranks of `group`, a torch.distributed group of any
    backend; constructing one is collective, and so is `destroy`.

    Numbers of bytes and queue pairs are accepted and unused: groups take what they need. Tensors are
    on the GPU that is current now, or on the CPU with the stand-ins.
    """

    num_sms: int = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0,
                 low_latency_mode: bool = False, num_qps_per_rank: int = 24,
                 allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
                 explicitly_destroy: bool = False, enable_shrink: bool = False,
                 comm: Any = None, *, use_fabric: bool = False) -> None:
        if enable_shrink:
            raise NotImplementedError("enable_shrink: a rank that is lost fails the whole group")
        if comm is not None:
            raise NotImplementedError("comm: pass a torch.distributed group as `group`")
        super().__init__(group, explicitly_destroy)
        self.rank, self.group_size = self.shared.rank, self.shared.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """SMs that high-throughput groups made from now on may use."""
        if integer("new_num_sms", new_num_sms, least=2) % 2:
            raise ValueError(f"new_num_sms: must be even, not {new_num_sms}")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A `Config` of the current number of SMs; any number of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The same."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int,
                                       num_ranks: int, num_experts: int) -> int:
        """Bytes of the window of a low-latency group for rows of bfloat16; it needs no `num_rdma_bytes`."""
        return 4 * num_ranks * num_max_dispatch_tokens_per_rank * (2 * hidden + _SLOT)

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether FP8 rows can be cast."""
        return True

    @staticmethod
    def capture() -> EventOverlap:
        """An event at this point of the current stream."""
        return EventOverlap(EventHandle())

    def get_local_buffer_tensor(self, dtype: torch.dtype, size: Any = None, offset: int = 0,
                                use_rdma_buffer: bool = False) -> torch.Tensor:
        """Not served."""
        raise NotImplementedError("get_local_buffer_tensor: there is no buffer that callers may see")

    @without_gradients
    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int,
                            previous_event: EventOverlap | None = None, async_finish: bool = False,
                            allocate_on_comm_stream: bool = False) -> tuple[Any, ...]:
        """num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank and
        an event, for ids [T, K]. `dispatch` ignores all but the number of experts."""
        if integer("num_experts", num_experts, least=1) % self.group_size:
            raise ValueError(f"num_experts: {num_experts} is no multiple of {self.group_size} ranks")
        require_tensor("topk_idx", topk_idx)
        with self._comm.on(previous_event, [topk_idx], async_finish, local=True) as beside:
            ids = checked_integers("topk_idx", topk_idx, ("T", "K"), self.shared.device)
            result = layout(ids, num_experts, self.group_size)
        return *result, self._comm.finish(beside, async_finish, result)

    @without_gradients
    def dispatch(self, x: torch.Tensor | _Pair | list[torch.Tensor], handle: Any = None,
                 num_tokens_per_rank: torch.Tensor | None = None,
                 num_tokens_per_rdma_rank: torch.Tensor | None = None,
                 is_token_in_rank: torch.Tensor | None = None,
                 num_tokens_per_expert: torch.Tensor | None = None,
                 topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None,
                 expert_alignment: int = 1, num_worst_tokens: int = 0,
                 config: Config | None = None, previous_event: EventOverlap | None = None,
                 async_finish: bool = False,
                 allocate_on_comm_stream: bool = False) -> tuple[Any, ...]:
        """x [T, H], or with scales [T, S], to rows [n, H] (and scales), local ids int64 and weights
        float32 [n, K], rows of each expert, a handle and an event.

        With `handle`, that of an earlier dispatch: rows, four times None, and an event.
        """
        tokens, scales = x if isinstance(x, (tuple, list)) else (x, None)
        if handle is not None:
            for name, value in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
                if value is not None:
                    raise ValueError(f"{name}: must be None with a handle")
            with self._comm.on(previous_event, [tokens, scales], async_finish) as beside:
                received = high_throughput.cached_dispatch(_routing(handle), tokens, scales=scales)
            received_x = received.tokens if scales is None else (received.tokens, received.scales)
            event = self._comm.finish(beside, async_finish, [received.tokens, received.scales])
            return received_x, None, None, None, None, event
        if topk_idx is None or topk_weights is None or num_tokens_per_expert is None:
            raise NotImplementedError("topk_idx, topk_weights, num_tokens_per_expert: a dispatch "
                                      "without a handle needs all three")
        high_throughput.aligned([], expert_alignment)
        worst = integer("num_worst_tokens", num_worst_tokens)
        require_tensor("num_tokens_per_expert", num_tokens_per_expert)
        inputs = high_throughput.Given(tokens, scales, topk_idx, topk_weights)
        sms = Buffer.num_sms if config is None else config.num_sms
        row_bytes = high_throughput.row_bytes(tokens, scales, self.shared.device)
        group, host = self.shared.high_throughput(num_tokens_per_expert.shape[0], row_bytes, sms)
        with self._comm.on(previous_event, inputs, async_finish) as beside:
            first = high_throughput.first_dispatch(group, None if worst else host, inputs, worst)
        received = first.received
        event = self._comm.finish(beside, async_finish, received)
        return (received.tokens if scales is None else (received.tokens, received.scales), received.topk_idx,
                received.topk_weights, high_throughput.aligned(first.per_expert, expert_alignment), first.routing,
                event)

    @without_gradients
    def combine(self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None,
                bias: Any = None, config: Config | None = None,
                previous_event: EventOverlap | None = None, async_finish: bool = False,
                allocate_on_comm_stream: bool = False) -> tuple[Any, ...]:
        """x [n, H] to sums over ranks [T, H], plus `bias`; weights [n, K], if given, to [T, K]; and
        an event."""
        given = bias if isinstance(bias, (tuple, list)) else (bias,)
        with self._comm.on(previous_event, [x, topk_weights, *given], async_finish) as beside:
            sums, weights = high_throughput.combine(_routing(handle), x, topk_weights, bias)
        return sums, weights, self._comm.finish(beside, async_finish, [sums, weights])

    @without_gradients
    def low_latency_dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor,
                             num_max_dispatch_tokens_per_rank: int, num_experts: int,
                             cumulative_local_expert_recv_stats: torch.Tensor | None = None,
                             dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
                             use_fp8: bool = True, round_scale: bool = False,
                             use_ue8m0: bool = False, async_finish: bool = False,
                             return_recv_hook: bool = False, *, use_nvfp4: bool = False,
                             x_global_scale: torch.Tensor | None = None) -> tuple[Any, ...]:
        """x bfloat16 [T, H] to rows [L, R*M, H], with `use_fp8` e4m3 and scales by columns; counts
        int32 [L]; a handle, an event, and a hook that receives if it is asked for.

        `topk_idx` must not change until the combine has run. All ranks ask alike. Two operations may be in flight. The
        nanoseconds of `EpGroup.time_waits` are added to `dispatch_wait_recv_cost_stats`, int64 [R].
        """
        if use_nvfp4 or x_global_scale is not None:
            raise NotImplementedError("use_nvfp4, x_global_scale: rows travel in bfloat16 or FP8; choose one of these, "
                                      "and cast to 4 bits behind the dispatch")
        cast = low_latency.cast_name(use_fp8, round_scale, use_ue8m0)
        timing = Timing(self._comm, async_finish, return_recv_hook)
        x, topk_idx = low_latency.checked_tokens(x, topk_idx, num_max_dispatch_tokens_per_rank,
                                                 self.shared.device)
        pool = self.shared.low_latency(num_experts, x.shape[1], num_max_dispatch_tokens_per_rank)
        return low_latency.dispatch(pool, x, topk_idx, cast, cumulative_local_expert_recv_stats,
                                    dispatch_wait_recv_cost_stats, timing)

    @without_gradients
    def low_latency_combine(self, x: torch.Tensor, topk_idx: torch.Tensor,
                            topk_weights: torch.Tensor, handle: Any, use_logfmt: bool = False,
                            zero_copy: bool = False, async_finish: bool = False,
                            return_recv_hook: bool = False, out: torch.Tensor | None = None,
                            combine_wait_recv_cost_stats: torch.Tensor | None = None, *,
                            overlap: bool = False, packed_recv_count: torch.Tensor | None = None,
                            comp_signal: torch.Tensor | None = None, block_m: int = 64, threshold: int = 0,
                            num_sms: int = 3, src_signals: torch.Tensor | None = None,
                            src_signal_expect_value: int = 0) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """x bfloat16 [L, R*M, H] to weighted sums [T, H], an event and a hook, as in dispatch.

        The ids are those of the dispatch; rows travel as they are also with `use_logfmt`. The nanoseconds of
        `EpGroup.time_combine_waits` are added to `combine_wait_recv_cost_stats`, int64 [R].

        With `overlap`, of DeepEP's branches, x may still be computed: signals are not looked at, and nothing is sent
        before the hook, behind the stream that is current there.
        """
        slot = _slot(handle)
        timing = Timing(self._comm, async_finish, return_recv_hook, overlap)
        if zero_copy:
            if slot.buffer is None:
                raise ValueError("zero_copy: get_next_low_latency_combine_buffer(handle) comes first")
            x = slot.buffer
        checked_integers("topk_idx", topk_idx, (slot.tokens, slot.handle.top_k), slot.group.device)
        return low_latency.combine(slot, x, topk_weights, out, combine_wait_recv_cost_stats, timing)

    def get_next_low_latency_combine_buffer(self, handle: Any) -> torch.Tensor:
        """bfloat16 [L, R*M, H], which a combine with `zero_copy` sends."""
        slot = _slot(handle)
        group = slot.group
        shape = (group.num_local_experts, group.world_size * group.max_tokens_per_rank, group.hidden)
        slot.buffer = torch.empty(shape, dtype=torch.bfloat16, device=group.device)
        return slot.buffer

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int,
                                 num_experts: int) -> None:
        """Does nothing: the modes have memory of their own."""

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes zeros: no rank is masked."""
        mask_status.zero_()

    def low_latency_clean_mask_buffer(self) -> None:
        """Does nothing: no rank is masked."""

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Takes back a mask, which no rank has."""
        if mask:
            raise NotImplementedError("mask: a rank that is lost fails the whole group")


def _routing(handle: Any) -> high_throughput.Routing:
    if not isinstance(handle, high_throughput.Routing):
        raise TypeError(f"handle: must be what dispatch returned, not {type(handle).__name__}")
    return handle


def _slot(handle: Any) -> LowLatencyHandle:
    if not isinstance(handle, LowLatencyHandle):
        raise TypeError("handle: must be what low_latency_dispatch returned, not "
                        f"{type(handle).__name__}")
    return handle
