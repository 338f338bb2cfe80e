"""The low-latency calls of `Buffer`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nccl_ep.arguments import integer, row_bytes
from nccl_ep.deep_ep.events import CommStream, EventOverlap
from nccl_ep.handle_pool import Pool, Slot
from nccl_ep.operators.traced import is_traced
from nccl_ep.row_layout import low_latency_shape
from nccl_ep.runtime import Use, current_stream, on_stream, uses_stand_ins
from nccl_ep.scales import CastName
from nccl_ep.tensors import checked, checked_integers, checked_output

Hook = Callable[[], None]


class LowLatencyHandle(Slot):
    """What `low_latency_dispatch` returns as `handle`. It cannot be looked into, as DeepEP's tuple can."""

    def __init__(self, pool: Pool, topk_idx: torch.Tensor) -> None:
        super().__init__(pool, topk_idx, "handle")
        # What `get_next_low_latency_combine_buffer` has given.
        self.buffer: torch.Tensor | None = None

    def __getitem__(self, place: object) -> Any:
        raise NotImplementedError("handle[..]: this handle has no tensors; rows come in the order of "
                                  "source rank, token and k")


def cast_name(use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> CastName | None:
    """The cast of a dispatch with these arguments."""
    if not use_fp8:
        return None
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0: needs round_scale")
    return "ue8m0_packed" if use_ue8m0 else "fp8_pow2" if round_scale else "fp8"


class Timing:
    """When an operation runs, and who waits for it."""

    def __init__(self, comm: CommStream, async_finish: bool, return_recv_hook: bool, overlap: bool = False) -> None:
        if async_finish and return_recv_hook:
            raise ValueError("async_finish: cannot go with return_recv_hook")
        if overlap and not return_recv_hook:
            raise NotImplementedError("overlap: needs return_recv_hook, as nothing is sent before the hook")
        self._comm, self.is_async, self.is_late = comm, async_finish, overlap
        self.staged = return_recv_hook and not overlap

    def run(self, slot: Slot, start: Callable[[], list[Any]], receive: Hook, after: Hook,
            inputs: list[torch.Tensor]) -> tuple[EventOverlap, Hook | None]:
        """Calls `start`, which stages the operation if `staged` and returns its results, and `after`;
        this then, or in the hook that is returned, after `receive`. The event keeps `inputs`.

        If `is_late`, the hook calls both."""
        if self.is_async:
            with self._comm.on(None, inputs, True) as beside:
                results = start()
                after()
            return self._comm.finish(beside, True, results), None
        event = EventOverlap(extra_tensors=tuple(inputs))
        order = self._comm.order
        if self.is_late:
            return event, _hook(start, after, order, is_late=True)
        with order:
            start()
            if not self.staged:
                after()
                return event, None
        hook = _hook(receive, after, order)
        slot.end_with(hook)
        return event, hook


def checked_tokens(x: torch.Tensor, topk_idx: torch.Tensor, most: int,
                   device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H] and ids int64 [T, K] of a dispatch of at most `most` tokens, before anything is taken."""
    x = checked("x", x, ("T", "H"), device)
    row_bytes("x", x.shape[1], x.dtype)
    name = "num_max_dispatch_tokens_per_rank"
    if x.shape[0] > integer(name, most, least=1):
        raise ValueError(f"{name}: is {most}, but x has {x.shape[0]} tokens")
    return x, checked_integers("topk_idx", topk_idx, (x.shape[0], "K"), device)


def dispatch(pool: Pool, x: torch.Tensor, topk_idx: torch.Tensor, cast: CastName | None,
             stats: torch.Tensor | None, waits: torch.Tensor | None, timing: Timing) -> tuple[Any, ...]:
    """`Buffer.low_latency_dispatch`."""
    if stats is not None:
        experts = pool.group.num_local_experts
        checked_output("cumulative_local_expert_recv_stats", stats, (experts,), pool.group.device, torch.int32)
    slot = LowLatencyHandle(pool, topk_idx)
    received: list[Any] = []

    def start() -> list[Any]:
        with _added_to(waits, pool.group.time_waits):
            slot.route(topk_idx)
            if timing.staged:
                slot.stage()
            received.append(slot.handle.dispatch(slot.padded(x), cast=cast, scales_order="column",
                                                 send_only=timing.staged))
        return list(received[0])

    def count() -> None:
        if stats is not None:
            stats.add_(received[0].counts)

    inputs = [x, topk_idx, *(each for each in (stats, waits) if each is not None)]
    try:
        # The hook has the slot, whose handle nobody else may take before.
        event, hook = timing.run(slot, start, lambda: slot.handle.complete(), count, inputs)
    except BaseException:
        slot.release()
        raise
    [result] = received
    rows = result.tokens if cast is None else (result.tokens, result.scales)
    return rows, result.counts, slot, event, hook


@contextlib.contextmanager
def _added_to(waits: torch.Tensor | None, time: Callable[[torch.Tensor | None], None]) -> Iterator[None]:
    """Operations that begin meanwhile add their times to `waits`, if that is given."""
    if waits is None:
        yield
        return
    time(waits)
    try:
        yield
    finally:
        time(None)


def combine(slot: LowLatencyHandle, x: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor | None,
            waits: torch.Tensor | None, timing: Timing) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
    """`Buffer.low_latency_combine`."""
    handle = slot.handle
    device = handle.group.device
    rows = checked("x", x, (*low_latency_shape(handle.group, 0, False)[:2], "H"), device)
    # A copy, which rows that do not lie densely need, would have what is there before the hook.
    x = x if timing.is_late else rows
    shape = slot.tokens, x.shape[-1]
    weights = checked("topk_weights", topk_weights, (slot.tokens, handle.top_k), device,
                      torch.float32)
    result = (torch.empty(shape, dtype=x.dtype, device=device) if out is None else
              checked_output("out", out, shape, device, x.dtype))
    # Operators, as a mode of torch makes them, take no `out` in stages.
    is_whole = slot.tokens == handle.num_tokens and not is_traced()
    sums: list[torch.Tensor] = []

    # A late one starts in its hook.
    def start() -> list[Any]:
        with slot.held(), _added_to(waits, handle.group.time_combine_waits):
            if timing.staged:
                slot.stage()
            sums.append(handle.combine(x, slot.padded(weights), out=result if is_whole else None,
                                       send_only=timing.staged))
        return [result]

    def bring() -> None:
        if not is_whole:
            result.copy_(sums[0][:slot.tokens])
        slot.release()

    inputs = [x, weights, result] if waits is None else [x, weights, result, waits]
    with slot.held():
        event, hook = timing.run(slot, start, handle.complete, bring, inputs)
    return result, event, hook


def _hook(receive: Callable[[], Any], after: Hook, order: Use, is_late: bool = False) -> Hook:
    """Receives, once, on the stream that is current now; if `is_late`, behind that which is current then."""
    stream = None if uses_stand_ins() else current_stream()
    pending = [True]

    def hook() -> None:
        if not pending:
            return
        pending.clear()
        # Also of results that inference mode has made, whatever mode is on now.
        with torch.inference_mode():
            if is_late and stream is not None:
                stream.wait_stream(current_stream())
            with contextlib.nullcontext() if stream is None else on_stream(stream), order:
                receive()
                after()

    return hook
