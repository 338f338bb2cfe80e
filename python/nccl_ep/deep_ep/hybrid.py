"""`HybridEPBuffer`: the object of DeepEP's branch `hybrid-ep`, over high-throughput groups of this library."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nccl_ep.arguments import integer
from nccl_ep.deep_ep import high_throughput
from nccl_ep.deep_ep.elastic import LEAST_BOUND, MOST_ROWS
from nccl_ep.deep_ep.high_throughput import Routing, on_sms
from nccl_ep.deep_ep.shared import NotServed, Sharing
from nccl_ep.gradients import without_gradients
from nccl_ep.memory import MOST_TOP_K
from nccl_ep.rendezvous import collective_device
from nccl_ep.routing import known_ids
from nccl_ep.tensors import checked, checked_integers


class HybridEPConfig(NamedTuple):
    """What a buffer was made for, with the most tokens of all ranks."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int


class _Ids(NamedTuple):
    """The experts of each token: int64 [T, K], -1 where it has fewer. K is the same on all ranks, whatever their tokens
    are, so nobody asks the others."""

    topk_idx: torch.Tensor
    num_experts: int
    is_dense: bool  # the k of an expert is its number
    too_many: torch.Tensor | None  # whether a token has more than K; None if none can

    @classmethod
    def of_map(cls, routing_map: torch.Tensor, most: int) -> _Ids:
        """Of a map [T, E] in which tokens have at most so many experts, if there are more."""
        experts = routing_map.shape[1]
        is_dense = experts <= most
        dtype = torch.int64 if is_dense else torch.int16 if experts <= 1 << 15 else torch.int32  # GPUs sort it faster
        ids = torch.where(routing_map, torch.arange(experts, dtype=dtype, device=routing_map.device), -1)
        if is_dense:
            return cls(ids, experts, True, None)
        too_many = (routing_map.sum(dim=1) > most).any()
        return cls(ids.topk(most, dim=1).values.to(torch.int64), experts, False, too_many)

    def by_k(self, probs: torch.Tensor) -> torch.Tensor:
        """Of probs [T, E] those of the ids [T, K]; anything where there is no id."""
        ids = self.topk_idx
        probs = checked("probs", probs, (ids.shape[0], self.num_experts), ids.device, torch.float32)
        return probs if self.is_dense else probs.gather(1, ids.clamp(0, self.num_experts - 1))

    def dense(self, gradients: torch.Tensor) -> torch.Tensor:
        """Of gradients [T, K] those of probs [T, E], zeros where the token has no such expert."""
        if self.is_dense:
            return gradients
        found = gradients.new_zeros((gradients.shape[0], self.num_experts + 1))
        found.scatter_(1, known_ids(self.topk_idx, self.num_experts), gradients)
        return found[:, :self.num_experts].contiguous()


@dataclasses.dataclass(eq=False)
class HybridEPHandle:
    """What `dispatch_with_permute` returns: one routing, for cached dispatches and `combine_with_unpermute`.

    It has one element, the last: bool [1], whether rows came beyond `num_permuted_tokens` and were dropped.
    """

    routing: Routing
    ids: _Ids
    tokens_per_expert: torch.Tensor
    has_dropped: torch.Tensor

    def __getitem__(self, place: object) -> torch.Tensor:
        if place == -1:
            return self.has_dropped
        raise NotImplementedError("handle[..]: this handle has no tensors but the last, whether rows were dropped; "
                                  "rows come in the order of expert, source rank and token")


class HybridEPBuffer(Sharing):
    """Dispatch to rows by expert, and combine, on the ranks of `group`, a torch.distributed group of any backend;
    constructing one is collective. It is never destroyed: its groups stay for the next one.

    Ranks may have different numbers of tokens, up to the largest `max_num_of_tokens_per_rank` of all. More are taken,
    too, if all ranks have more: a group for more is made then. The numbers of SMs are those of operations, by
    default as many as the library wants; blocks of permutations and a number for preprocessing are accepted and unused.
    """

    # Most experts of a token, if there are more. Handles keep 4 bytes for each, and each token that may come.
    max_topk: int = MOST_TOP_K

    def __init__(self, group: Any, hidden_dim: int, max_num_of_tokens_per_rank: int, num_local_experts: int,
                 use_fp8: bool = False, num_sms_dispatch_api: int | None = None, num_sms_combine_api: int | None = None,
                 num_blocks_permute: int | None = None, num_blocks_unpermute: int | None = None,
                 num_sms_preprocessing_api: int | None = None, load_cached_kernels: bool = False) -> None:
        most = integer("max_num_of_tokens_per_rank", max_num_of_tokens_per_rank)
        local = integer("num_local_experts", num_local_experts, least=1)
        self.num_sms_dispatch = integer("num_sms_dispatch_api", num_sms_dispatch_api or 0)
        self.num_sms_combine = integer("num_sms_combine_api", num_sms_combine_api or 0)
        hidden = integer("hidden_dim", hidden_dim, least=1)
        super().__init__(group, explicitly_destroy=False)
        self.rank, self.group_size = self.shared.rank, self.shared.size
        # A rank may have no tokens at first, and all need the same groups.
        together = torch.tensor([most], device=collective_device(dist, self.shared.group))
        dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self.shared.group)
        self.config = HybridEPConfig(hidden, int(together), local)

    def __getattr__(self, name: str) -> Any:
        if name in ("dispatch", "combine", "update_template_config"):
            raise NotServed(f"{name}: of this class dispatch_with_permute and combine_with_unpermute are served; "
                            "Buffer and ElasticBuffer have rows by token")
        raise AttributeError(name)

    @without_gradients
    def dispatch_with_permute(self, hidden: torch.Tensor, *, topk_idx: torch.Tensor | None = None,
                              topk_weights: torch.Tensor | None = None, num_of_experts_per_rank: int | None = None,
                              num_of_experts: int | None = None, routing_map: torch.Tensor | None = None,
                              probs: torch.Tensor | None = None, scaling_factor: torch.Tensor | None = None,
                              num_permuted_tokens: Any = None, pad_multiple: int | None = None,
                              handle: HybridEPHandle | None = None, non_blocking: bool = False,
                              fuse_permute_dispatch: bool = False) -> tuple[Any, ...]:
        """hidden [T, H], of any type with scaling_factor [T, S], to rows [P, H] by expert, probs float32 [P] and scales
        [P, S] where they were given, tokens_per_expert int64 [L], filled up to `pad_multiple`, a power of two, and a
        handle.

        Routes by routing_map bool [T, E] and probs float32 [T, E], or by topk_idx [T, K] and topk_weights float32
        [T, K]. The host waits for P, and tokens_per_expert is on the CPU; or P is `num_permuted_tokens`, nobody waits,
        what comes beyond is dropped, the last experts' rows first, and rows behind the last expert's are undefined.
        With `handle` as that was routed; of the others only probs or topk_weights, and scaling_factor, have an effect.
        """
        scales = scaling_factor
        with self._comm.on(None, [], False):
            if handle is None:
                ids = self._ids(hidden, topk_idx, routing_map, self._experts(num_of_experts, num_of_experts_per_rank))
                weights = topk_weights if probs is None else ids.by_k(probs)
                if non_blocking and num_permuted_tokens is None:
                    raise ValueError("num_permuted_tokens: needed with non_blocking")
                handle = self._routed(ids, high_throughput.Given(hidden, scales, ids.topk_idx, weights),
                                      integer("pad_multiple", pad_multiple or 1, least=1), num_permuted_tokens)
            else:
                handle = _checked(handle)
                weights = topk_weights if probs is None else handle.ids.by_k(probs)
            received = high_throughput.cached_dispatch(handle.routing, hidden, weights, scales=scales,
                                                       choice=on_sms(self.num_sms_dispatch))
        return received.tokens, received.topk_weights, received.scales, handle.tokens_per_expert, handle

    @without_gradients
    def combine_with_unpermute(self, hidden: torch.Tensor, *, probs: torch.Tensor | None = None,
                               handle: HybridEPHandle | None = None, pad_multiple: int | None = None,
                               fuse_unpermute_combine: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden [P, H] to sums over a token's rows [T, H]; probs [P], if given, to float32 [T, E], else None."""
        handle = _checked(handle)
        with self._comm.on(None, [], False):
            sums, gradients = high_throughput.combine(handle.routing, hidden, probs, None, on_sms(self.num_sms_combine))
            return sums, None if gradients is None else handle.ids.dense(gradients)

    def _experts(self, num_of_experts: int | None, num_of_experts_per_rank: int | None) -> int:
        """E, on which both must agree if they are given."""
        local = num_of_experts_per_rank or self.config.num_of_experts_per_rank
        experts = integer("num_of_experts", num_of_experts or local * self.group_size)
        if num_of_experts_per_rank and experts != local * self.group_size:
            raise ValueError(f"num_of_experts: is {experts}, but num_of_experts_per_rank is {local}, and there are "
                             f"{self.group_size} ranks")
        return experts

    def _ids(self, hidden: torch.Tensor, topk_idx: torch.Tensor | None, routing_map: torch.Tensor | None,
             experts: int) -> _Ids:
        checked("hidden", hidden, ("T", "H"), self.shared.device)
        if routing_map is not None and topk_idx is None:
            shape = (hidden.shape[0], experts)
            return _Ids.of_map(checked("routing_map", routing_map, shape, hidden.device, torch.bool), self.max_topk)
        if topk_idx is None or routing_map is not None:
            raise ValueError("routing_map, topk_idx: one of them is needed without a handle")
        ids = checked_integers("topk_idx", topk_idx, (hidden.shape[0], "K"), hidden.device)
        return _Ids(ids.clone(), experts, False, None)  # for gradients, which come later

    def _routed(self, ids: _Ids, given: high_throughput.Given, alignment: int, rows: Any) -> HybridEPHandle:
        """A handle for these ids, whose rows are so many, or as many as come."""
        if alignment & (alignment - 1):
            raise ValueError(f"pad_multiple: must be a power of two, not {alignment}")
        if rows is None and given.x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError("num_permuted_tokens: needed in a CUDA graph, where nobody can wait for that number")
        rows = None if rows is None else integer("num_permuted_tokens", rows)
        tokens, top_k = ids.topk_idx.shape
        most = MOST_ROWS // self.group_size
        if tokens > most:
            raise ValueError(f"hidden: has {tokens} tokens, and there is room for {most} of a rank")
        if top_k > MOST_TOP_K:
            raise ValueError(f"topk_idx: has {top_k} experts for each token, at most {MOST_TOP_K} are served")
        # Ranks with different numbers of tokens need the same group.
        made_for = min(max(self.config.max_num_of_tokens_per_rank, LEAST_BOUND), most)
        bound = made_for if tokens <= made_for else most
        row_bytes = high_throughput.row_bytes(given.x, given.scales, self.shared.device)
        group, host = self.shared.high_throughput(ids.num_experts, row_bytes, 0, bound)
        text = (f"routing_map: a token has more than {top_k} experts, which HybridEPBuffer.max_topk allows, and the "
                f"library up to {MOST_TOP_K}")
        if rows is not None and ids.too_many is not None:
            torch._assert_async(ids.too_many.logical_not(), text)
        routed, counts = high_throughput.routed(group, None, given, alignment, rows)
        if rows is None:
            host.start(counts if ids.too_many is None else torch.where(ids.too_many, -1, counts))
            per_expert = host.wait().tolist()
            if min(per_expert) < 0:
                raise ValueError(text)
            per_expert = high_throughput.aligned(per_expert, alignment)
            return HybridEPHandle(Routing(routed, sum(per_expert)), ids, torch.tensor(per_expert, device="cpu"),
                                  counts.new_zeros(1, dtype=torch.bool))
        ends = ((counts + (alignment - 1)) // alignment * alignment).cumsum(dim=0)
        kept = ends.clamp(max=rows).diff(prepend=ends.new_zeros(1))
        return HybridEPHandle(Routing(routed, rows), ids, kept, ends[-1:] > rows)


def _checked(handle: HybridEPHandle | None) -> HybridEPHandle:
    if not isinstance(handle, HybridEPHandle):
        raise TypeError(f"handle: must be what dispatch_with_permute returned, not {type(handle).__name__}")
    return handle
