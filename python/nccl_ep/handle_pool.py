"""Low-latency handles for calls that bring their own ids.

A dispatch takes a handle, and its combine gives it back. Until another dispatch takes it, it can be combined again. Its
ids are read where they lie, until the combine has run.

Over several nodes routing a handle is collective and fixes the number of tokens. So handles have memory for M tokens'
ids there, to which those of a dispatch are copied, padded with -1. In traced code, too, where ids have no address.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import pathlib
import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nccl_ep.arguments import cannot_be_copied
from nccl_ep.group import EpGroup
from nccl_ep.handle import EpHandle
from nccl_ep.operators.traced import is_traced
from nccl_ep.rendezvous import collective_device

_Shape = tuple[int, int]
_Address = tuple[int, torch.Size]
_MOST_STAGED = 2  # operations of a group that are in flight
_MOST_READERS = 8  # handles that read ids in place: layers bring theirs at few addresses by turns


class Place:
    """A handle, how often it has been taken, and where its ids lie, or None if in memory of its own."""

    def __init__(self, handle: EpHandle[Any], free: list[Place], ids: _Address | None) -> None:
        self.handle, self.ids, self.takes = handle, ids, 0
        self.free = free  # where it is while nobody has it
        self.staged = 0  # the number of its last staged operation
        self.is_given_up = False


class Pool:
    """The handles of a group."""

    def __init__(self, group: EpGroup[Any], is_one_node: bool) -> None:
        self.group, self.is_one_node = group, is_one_node
        # Those that read ids in place, and by shape those with memory for them.
        self._free: dict[_Shape | None, list[Place]] = {None: []}
        self._readers = 0
        self._made: list[EpHandle[Any]] = []
        self._numbers = itertools.count(1)
        # On one node those with a staged operation that nobody can complete.
        self._dropped: list[Place] = []

    def find(self, topk_idx: torch.Tensor) -> Place:
        """That of a free handle for ids int64 [T, K], dense, of T up to M."""
        tokens, top_k = topk_idx.shape
        if not self.is_one_node or is_traced():
            shape = (tokens if self.is_one_node else self.group.max_tokens_per_rank, top_k)
            free = self._free.setdefault(shape, [])
            return free[-1] if free else self._made_with_memory(shape, free)
        free, address = self._free[None], _address(topk_idx)
        found = next((each for each in reversed(free) if each.ids == address), free[0] if free else None)
        if found is None or found.ids != address and self._readers < _MOST_READERS:
            found = self._new(topk_idx, free, address)
            self._readers += 1
        return found

    def _made_with_memory(self, shape: _Shape, free: list[Place]) -> Place:
        # Also usable outside of inference mode, if that is on now.
        with torch.inference_mode(False):
            return self._new(torch.full(shape, -1, dtype=torch.int64, device=self.group.device), free, None)

    def _new(self, ids: torch.Tensor, free: list[Place], address: _Address | None) -> Place:
        # The constructor, as a mode of torch may be on, and `create_handle` trace.
        made = EpHandle(self.group, ids)
        self._made.append(made)
        free.append(Place(made, free, address))
        return free[-1]

    def stage(self, place: Place) -> None:
        """Before a staged operation. Where there is no room, the first one that nobody can complete is abandoned, with
        its handle. Not before, as ranks drop hooks at different times, and the same ones must be in flight on all."""
        place.staged = next(self._numbers)
        if not self._dropped or sum(bool(each.staged_outputs) for each in self._made) < _MOST_STAGED:
            return
        first = min(self._dropped, key=lambda each: each.staged)
        self._dropped.remove(first)
        self._made.remove(first.handle)
        self._readers -= first.ids is not None
        first.is_given_up = True
        first.handle.close()

    def drop(self, place: Place, staged: int) -> None:
        """The hook of this operation is gone. Graphs replay captured ones; over nodes ranks cannot give up alike."""
        handle = place.handle
        if self.is_one_node and place.staged == staged and handle.staged_outputs and not handle.is_captured:
            self._dropped.append(place)

    def close(self) -> None:
        """Destroys all handles."""
        for handle in self._made:
            handle.close()


class Slot:
    """A handle for ids int64 [T, K], dense, of T up to M, until another dispatch takes it; without them before `route`.

    Its user knows it as argument `name` of a combine.
    """

    def __init__(self, pool: Pool, topk_idx: torch.Tensor, name: str) -> None:
        self.group, self.tokens, self._name = pool.group, topk_idx.shape[0], name
        self._pool, self._place = pool, (place := pool.find(topk_idx))
        self._is_held = False
        place.takes += 1
        self._take = place.takes
        self.hold()

    @property
    def handle(self) -> EpHandle[Any]:
        """The handle; RuntimeError once another dispatch has it."""
        if self._place.is_given_up:
            raise RuntimeError(f"{self._name}: nobody called its hook, and a later operation has taken its place")
        if self._place.takes != self._take:
            raise RuntimeError(f"{self._name}: it has been combined, and another dispatch has its handle since; "
                               "combine before that")
        return self._place.handle

    def route(self, topk_idx: torch.Tensor) -> None:
        """Gives the handle these ids, on the current stream, where the dispatch follows."""
        place, handle = self._place, self.handle
        if place.ids is None:
            handle.topk_idx[:self.tokens].copy_(topk_idx)
            handle.topk_idx[self.tokens:].fill_(-1)
            return
        if place.ids != (address := _address(topk_idx)):
            handle.update(topk_idx)
            place.ids = address
        handle.reread(topk_idx)

    def stage(self) -> None:
        """Before a staged operation."""
        self._pool.stage(self._place)

    def end_with(self, hook: Callable[[], None]) -> None:
        """Only the hook completes the operation that was staged last."""
        weakref.finalize(hook, self._pool.drop, self._place, self._place.staged)

    def hold(self) -> None:
        """Keeps others from taking the handle until `release`."""
        if not self._is_held:
            self._place.free.remove(self._place)
            self._is_held = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds it for a combine, and gives it back if that fails before anything is enqueued. On one node a handle
        that was held before stays so for another try, and goes back with the slot; over nodes ranks drop slots at
        different times, but fail alike."""
        was_held = self._is_held
        self.hold()
        try:
            yield
        except BaseException:
            if not (was_held and self._pool.is_one_node or self._place.handle.staged_outputs):
                self.release()
            raise

    def release(self) -> None:
        """Its combine is enqueued, or nothing: others may take it."""
        if self._is_held:
            self._is_held = False
            self._place.free.append(self._place)

    # The ids' memory is the caller's again, who brings the next ones there. And a dispatch that nobody combines gives
    # its handle back; not over nodes, where all ranks must take the same, and drop their own at different times.
    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if _ending() or not hasattr(self, "_is_held"):
            return
        place = self._place
        if place.ids is not None and place.takes == self._take:
            place.handle.drop_ids()
        if self._is_held and self._pool.is_one_node and not place.handle.staged_outputs and not place.is_given_up:
            self.release()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        cannot_be_copied(self, "dispatch makes another")

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` [T, ..], and others behind them, as many as the handle has tokens; ids of -1 say that nobody reads
        these."""
        if (most := self._place.handle.num_tokens) == self.tokens:
            return rows
        padded = rows.new_empty((most, *rows.shape[1:]))
        padded[:self.tokens].copy_(rows)
        return padded


def _address(ids: torch.Tensor) -> _Address:
    return ids.data_ptr(), ids.shape


def is_one_node(group: Any) -> bool:
    """Whether all ranks say the same of the machine that they run on; collective."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    name = os.environ.get("NCCL_HOSTID") or socket.gethostname() + (
        boot.read_text() if boot.exists() else "")
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    mine = torch.tensor([number], dtype=torch.int64, device=collective_device(dist, group))
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, mine, group=group)
    return len({int(each) for each in all_of_them}) == 1
