"""Low-latency handles for calls that bring their own ids.

A handle is bound to memory of ids and to a number of tokens. So there are some for each number; a dispatch takes one
and copies its ids in, and its combine gives it back. Until another dispatch takes it, it can be combined again. Over
several nodes making one is collective and fixes the number of tokens, so all are for M tokens there, padded with ids
of -1.
"""

from __future__ import annotations

import collections
from typing import Any

import torch

from nccl_ep.group import EpGroup
from nccl_ep.handle import EpHandle
from nccl_ep.routing import padded, write_ids
from nccl_ep.runtime import Use


class Place:
    """A handle, how often it has been taken, and the end of its last use."""

    def __init__(self, handle: EpHandle[Any]) -> None:
        self.handle, self.takes = handle, 0
        self.used = Use(handle.group.device)


class Pool:
    """The handles of a group."""

    def __init__(self, group: EpGroup[Any], is_one_node: bool) -> None:
        self.group, self.is_one_node = group, is_one_node
        self._free: dict[tuple[int, int], list[Place]] = collections.defaultdict(list)
        self._made: list[EpHandle[Any]] = []

    def take(self, topk_idx: torch.Tensor) -> Slot:
        """A handle with the ids `topk_idx` int64 [T, K], which the caller may reuse at once; T is at
        most M."""
        tokens, top_k = topk_idx.shape
        shape = (tokens if self.is_one_node else self.group.max_tokens_per_rank, top_k)
        free = self._free[shape]
        if not free:
            # Also usable outside of inference mode, if that is on now.
            with torch.inference_mode(False):
                ids = torch.full(shape, -1, dtype=torch.int64, device=self.group.device)
                # The constructor, as a mode of torch may be on, and `create_handle` trace.
                made = EpHandle(self.group, ids)
            self._made.append(made)
            free.append(Place(made))
        slot = Slot(self, free[-1], tokens)
        try:
            write_ids(slot.handle.topk_idx, topk_idx)
        except BaseException:
            slot.release()
            raise
        return slot

    def free(self, handle: EpHandle[Any]) -> list[Place]:
        """Those that a dispatch may take instead of this one; the last is taken next."""
        return self._free[handle.num_tokens, handle.top_k]

    def close(self) -> None:
        """Destroys all handles."""
        for handle in self._made:
            handle.close()


class Slot:
    """What `low_latency_dispatch` returns as `handle`: a handle until another dispatch takes it.

    It cannot be looked into, as DeepEP's tuple can.
    """

    def __init__(self, pool: Pool, place: Place, tokens: int) -> None:
        self.group, self.tokens = pool.group, tokens
        self._pool, self._place = pool, place
        self._is_held = False
        place.takes += 1
        self._take = place.takes
        self.hold()
        # What `get_next_low_latency_combine_buffer` has given.
        self.buffer: torch.Tensor | None = None

    @property
    def handle(self) -> EpHandle[Any]:
        """The handle; RuntimeError once another dispatch has it."""
        if self._place.takes != self._take:
            raise RuntimeError("handle: it has been combined, and another dispatch has it since; "
                               "combine before that")
        return self._place.handle

    def hold(self) -> None:
        """Keeps others from taking the handle until `release`; the current stream waits for its last
        use."""
        if not self._is_held:
            self._pool.free(self.handle).remove(self._place)
            self._is_held = True
        self._place.used.current_stream_wait()

    def note_use(self) -> None:
        """An operation is enqueued on the current stream, which the next ones wait for."""
        self._place.used.note()

    def release(self) -> None:
        """Its combine is enqueued, or nothing: others may take it."""
        if self._is_held:
            self._is_held = False
            self._pool.free(self._place.handle).append(self._place)

    # A dispatch that nobody combines. Over nodes all ranks must take the same handles, and drop their
    # own at different times.
    def __del__(self) -> None:
        if (getattr(self, "_is_held", False) and self._pool.is_one_node
                and not self._place.handle.staged_outputs):
            self.release()

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` [T, ..] padded to the tokens of the handle; those after T have no ids."""
        return padded(rows, self._place.handle.num_tokens)

    def __getitem__(self, place: object) -> Any:
        raise NotImplementedError("handle[..]: this handle has no tensors; rows come in the order of "
                                  "source rank, token and k")
