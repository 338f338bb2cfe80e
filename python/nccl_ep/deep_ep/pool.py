"""Low-latency handles for calls that bring their own ids.

A handle is bound to memory of ids and to a number of tokens. So there are some for each number; a
dispatch takes one and copies its ids in, and its combine gives it back. Over several nodes making one is
collective and the number of tokens belongs to it, so all are for M tokens there, and ids of -1 fill up.
"""

from __future__ import annotations

import collections
from typing import Any

import torch

from nccl_ep.deep_ep.events import EventHandle
from nccl_ep.group import EpGroup
from nccl_ep.handle import EpHandle


class Pool:
    """The handles of a group."""

    def __init__(self, group: EpGroup[Any], is_one_node: bool) -> None:
        self.group, self.is_one_node = group, is_one_node
        # With the event of the last use, if that was on another stream.
        self._free: dict[tuple[int, int], list[tuple[EpHandle[Any], EventHandle | None]]] = (
            collections.defaultdict(list))
        self._made: list[EpHandle[Any]] = []

    def take(self, topk_idx: torch.Tensor) -> Slot:
        """A handle with the ids `topk_idx` [T, K], which the caller may reuse at once."""
        tokens, top_k = topk_idx.shape
        shape = (tokens if self.is_one_node else self.group.max_tokens_per_rank, top_k)
        free = self._free[shape]
        if not free:
            # Also usable outside of inference mode, if that is on now.
            with torch.inference_mode(False):
                ids = torch.full(shape, -1, dtype=torch.int64, device=self.group.device)
                made = self.group.create_handle(ids)
            self._made.append(made)
            free.append((made, None))
        handle, used = free.pop()
        if used is not None:
            used.current_stream_wait()
        handle.topk_idx[:tokens].copy_(topk_idx)
        handle.topk_idx[tokens:].fill_(-1)
        return Slot(self, handle, tokens)

    def give_back(self, handle: EpHandle[Any], used: EventHandle | None) -> None:
        """The handle may be taken again, behind the event `used`."""
        self._free[handle.num_tokens, handle.top_k].append((handle, used))

    def close(self) -> None:
        """Destroys all handles."""
        for handle in self._made:
            handle.close()


class Slot:
    """What `low_latency_dispatch` returns as `handle`: a handle until it is combined.

    It cannot be looked into, as DeepEP's tuple can.
    """

    def __init__(self, pool: Pool, handle: EpHandle[Any], tokens: int) -> None:
        self.group, self.tokens = pool.group, tokens
        self._pool: Pool | None = pool
        self._handle = handle
        # What `get_next_low_latency_combine_buffer` has given.
        self.buffer: torch.Tensor | None = None

    @property
    def handle(self) -> EpHandle[Any]:
        """The handle; RuntimeError once it has been combined."""
        if self._pool is None:
            raise RuntimeError("handle: it has been combined, and another dispatch may have it; "
                               "combine each dispatch once")
        return self._handle

    def release(self, used: EventHandle | None = None) -> None:
        """Its combine is enqueued, and has run at the event `used`."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.give_back(self._handle, used)

    # A dispatch that nobody combines. Over nodes all ranks must take the same handles, and drop their
    # own at different times.
    def __del__(self) -> None:
        pool = getattr(self, "_pool", None)
        if pool is not None and pool.is_one_node and not self._handle.staged_outputs:
            self.release()

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` [T, ..] for the tokens of the handle, of which those behind T have no ids."""
        most = self._handle.num_tokens
        if rows.shape[0] == most:
            return rows
        padded = rows.new_empty((most, *rows.shape[1:]))
        padded[:rows.shape[0]].copy_(rows)
        return padded

    def __getitem__(self, place: object) -> Any:
        raise NotImplementedError("handle[..]: this handle has no tensors; rows come in the order of "
                                  "source rank, token and k")
