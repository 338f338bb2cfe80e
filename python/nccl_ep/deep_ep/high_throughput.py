"""The high-throughput calls of `Buffer`."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch

from nccl_ep.arguments import ROW_ALIGN, cannot_be_copied, integer
from nccl_ep.choices import Choice
from nccl_ep.group import EpGroup
from nccl_ep.handle import EpHandle
from nccl_ep.results import DispatchResult
from nccl_ep.runtime import HostCopy
from nccl_ep.scales import checked_scales
from nccl_ep.tensors import Tag, checked, checked_integers, describe


class Routing:
    """What `dispatch` returns as `handle`: one routing, for cached dispatches and `combine`.

    It cannot be looked into, as DeepEP's tuple can.
    """

    def __init__(self, handle: EpHandle[Any], rows: int) -> None:
        self.handle, self.rows = handle, rows

    def __getitem__(self, place: object) -> Any:
        raise NotImplementedError("handle[..]: this handle has no tensors; rows come in the order of "
                                  "source rank and token")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        cannot_be_copied(self, "dispatch makes another")


class Given(NamedTuple):
    """Of a first dispatch: x [T, H], scales [T, S], ids and weights [T, K]."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None


class First(NamedTuple):
    """A first dispatch: what came, rows of each expert, here and, if that was asked for, on the host."""

    received: DispatchResult
    counts: torch.Tensor
    per_expert: list[int]
    routing: Routing


def first_dispatch(group: EpGroup[Any], host: HostCopy | None, given: Given, worst_tokens: int = 0) -> First:
    """The host waits for the counts if it has memory for them."""
    handle, counts = routed(group, host, given)
    x, scales, _, weights = given
    out = None
    if worst_tokens:
        out = torch.empty((worst_tokens, x.shape[1]), dtype=x.dtype, device=group.device)
    received = handle.dispatch(x, weights, out=out, scales=scales)
    per_expert = [] if host is None else host.wait().tolist()
    return First(received, counts, per_expert, Routing(handle, received.tokens.shape[0]))


def routed(group: EpGroup[Any], host: HostCopy | None, given: Given, alignment: int = 0,
           max_rows: int | None = None) -> tuple[EpHandle[Any], torch.Tensor]:
    """A handle for the ids of a dispatch, and tokens of each expert int32 [L], which `host` gets; also in a CUDA graph.
    Rows by expert beyond `max_rows` are dropped, but counted.

    Refuses what the dispatch would before: for its routing other ranks are waited for.
    """
    x, scales, ids, weights = given
    describe(checked("x", x, ("T", "H"), group.device), Tag.TOKENS)
    topk_idx = checked_integers("topk_idx", ids, (x.shape[0], "K"), group.device)
    if weights is not None:
        checked("topk_weights", weights, topk_idx.shape, group.device, torch.float32)
    if scales is not None:
        describe(checked_scales(scales, x.shape[0], group.device), Tag.SCALES)
    counts = torch.empty(group.num_local_experts, dtype=torch.int32, device=group.device)
    handle = group.open_handle(expert_alignment=alignment, max_rows=max_rows)
    handle.update(topk_idx, counts=counts)
    if host is not None:
        host.start(counts)
    return handle, counts


def cached_dispatch(routing: Routing, x: torch.Tensor, topk_weights: torch.Tensor | None = None, zeros: bool = False,
                    **options: Any) -> DispatchResult:
    """As many rows as the first had, also with a bound of them."""
    checked("x", x, (routing.handle.num_tokens, "H"), routing.handle.group.device)
    new = torch.zeros if zeros else torch.empty
    out = new((routing.rows, x.shape[1]), dtype=x.dtype, device=x.device)
    return routing.handle.dispatch(x, topk_weights, out=out, **options)


def combine(routing: Routing, x: torch.Tensor, topk_weights: torch.Tensor | None, bias: Any,
            choice: Choice | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sums [T, H], and weights [T, K] by k if `topk_weights` of rows are given; with weights nothing is chosen."""
    handle, weights = routing.handle, None
    x = checked("x", x, (routing.rows, "H"), handle.group.device)
    biases = [each for each in (bias if isinstance(bias, (tuple, list)) else (bias,)) if each is not None]
    for each in biases:
        checked("bias", each, (handle.num_tokens, x.shape[1]), handle.group.device)
    if topk_weights is None:
        sums = handle.combine(x, choice=choice)
    else:
        sums, weights = handle.combine_with_weights(x, topk_weights)
    for each in biases:
        sums += each
    return sums, weights


def on_sms(num_sms: int) -> Choice | None:
    """Of an operation with so many SMs; 0: as the library wants."""
    return Choice(blocks=num_sms) if num_sms else None


def aligned(counts: list[int], alignment: int) -> list[int]:
    """Each number rounded up; the rows themselves have no padding."""
    step = integer("expert_alignment", alignment, least=1)
    return counts if step == 1 else [-(-count // step) * step for count in counts]


def row_bytes(x: torch.Tensor, scales: torch.Tensor | None, device: torch.device) -> int:
    """Bytes of a row of a group for such tokens [T, H] and scales, whose results are bfloat16.

    Bytes may be two elements of 4 bits.
    """
    checked("x", x, ("T", "H"), device)
    elements = x.shape[1] * (2 if x.dtype == torch.uint8 else 1)
    size: int = elements * max(x.dtype.itemsize, 2)
    if scales is not None:
        of_scales = checked_scales(scales, x.shape[0], device).shape[1] * scales.dtype.itemsize
        size = max(size, x.shape[1] * x.dtype.itemsize + of_scales)
    return -(-size // ROW_ALIGN) * ROW_ALIGN
