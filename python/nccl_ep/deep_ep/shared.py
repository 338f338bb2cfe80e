"""The communicator and groups of a process group, which all its `Buffer`s share.

Programs make Buffers anew and forget to destroy them, and closing is collective. So groups are made
when an operation first needs them, which all ranks do alike, and closed with the last Buffer that is
destroyed explicitly, unless there was one that is not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nccl_ep.arguments import require_group
from nccl_ep.deep_ep.events import CommStream
from nccl_ep.group import EpGroup
from nccl_ep.handle_pool import Pool, is_one_node
from nccl_ep.nccl_wrapper import NCCLLibrary
from nccl_ep.rendezvous import collective_device, communicator
from nccl_ep.runtime import HostCopy, Runtime, Use
from nccl_ep.types import NCCL_EP_AUTO

_MOST_GROUPS = 4  # of a mode
_BFLOAT16 = 2  # bytes of an element


class NotServed(NotImplementedError, AttributeError):
    """Of an attribute that DeepEP has: the text says why, and hasattr says no."""


class Shared:
    """What the Buffers of one process group use together."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.library = NCCLLibrary()
        self.runtime = Runtime(self.library)
        with self.runtime.current():
            self.comm = communicator("group", group, self.library, self.runtime.interruptible)
        self.is_one_node = is_one_node(group)
        self.users = 0
        self.is_kept = False
        # Of all operations: two groups that waited for other ranks at the same time could wait for each other.
        self.order = Use(self.device)
        self._high: list[tuple[EpGroup[Any], HostCopy]] = []
        self._low: list[Pool] = []

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.runtime.device

    def high_throughput(self, num_experts: int, row_bytes: int, num_sms: int,
                        max_tokens: int = NCCL_EP_AUTO) -> tuple[EpGroup[Any], HostCopy]:
        """A group for such rows and M, and host memory for its counts [L]; the first call is collective."""
        for group, counts in self._high:
            room = group.hidden * group.dtype.itemsize
            if (group.num_experts, group.max_tokens_per_rank) == (num_experts, max_tokens) and room >= row_bytes:
                return group, counts
        _check_room(self._high, "num_max_tokens_per_rank")
        with self.runtime.current():
            group = EpGroup(num_experts, row_bytes // _BFLOAT16, algorithm="ht", comm=self.comm,
                            max_tokens_per_rank=max_tokens, num_channels=num_sms // 2)
        group.label = "deep_ep.Buffer"
        counts = HostCopy((group.num_local_experts,), torch.int32, group.device)
        self._high.append((group, counts))
        return group, counts

    def low_latency(self, num_experts: int, hidden: int, max_tokens: int) -> Pool:
        """Handles of a group for such rows and M; the first call is collective."""
        for pool in self._low:
            group = pool.group
            if (group.num_experts, group.max_tokens_per_rank) == (num_experts, max_tokens) and (
                    group.hidden == hidden):
                return pool
        _check_room(self._low, "num_max_dispatch_tokens_per_rank")
        with self.runtime.current():
            group = EpGroup(num_experts, hidden, algorithm="ll", max_tokens_per_rank=max_tokens, comm=self.comm)
        group.label = "deep_ep.Buffer"
        self._low.append(Pool(group, self.is_one_node))
        return self._low[-1]

    @property
    def groups(self) -> list[EpGroup[Any]]:
        """Of both modes."""
        return [pool.group for pool in self._low] + [group for group, _ in self._high]

    def has_failed(self) -> bool:
        """Whether a group has, on any rank: nothing can follow in it. Collective."""
        failed = any(self.library.ncclEpGetAsyncError(group.handle) for group in self.groups)
        on_any = torch.tensor([failed], dtype=torch.int32, device=collective_device(dist, self.group))
        dist.all_reduce(on_any, dist.ReduceOp.MAX, self.group)
        return bool(on_any.item())

    def close(self) -> None:
        """Releases everything; collective."""
        for pool in self._low:
            pool.close()
        for group in self.groups:
            group.close()
        self._low, self._high = [], []
        self.library.ncclCommDestroy(self.comm)


_SHARED: dict[Any, Shared] = {}


def enter(group: Any, explicitly_destroy: bool) -> Shared:
    """The shared part of a new Buffer; collective. After a failure it is a new one: the old one stays with the Buffers
    that have it."""
    require_group("group", group)
    group = dist.group.WORLD if group is None else group
    shared = _SHARED.get(group)
    if shared is None or shared.has_failed():
        shared = _SHARED[group] = Shared(group)
    if explicitly_destroy:
        shared.users += 1
    else:
        shared.is_kept = True
    return shared


def leave(shared: Shared) -> None:
    """A Buffer is destroyed; the last one of a process group closes its groups, collectively."""
    shared.users -= 1
    if shared.users == 0 and not shared.is_kept:
        if _SHARED.get(shared.group) is shared:
            del _SHARED[shared.group]
        shared.close()


class Sharing:
    """What the two kinds of Buffers have in common."""

    def __init__(self, group: Any, explicitly_destroy: bool) -> None:
        self.group, self.explicitly_destroy = group, explicitly_destroy
        self._shared: Shared | None = enter(group, explicitly_destroy)
        self._comm = CommStream(self._shared.device, self._shared.order)

    @property
    def shared(self) -> Shared:
        """What Buffers of this process group share; RuntimeError after `destroy`."""
        if self._shared is None:
            raise RuntimeError(f"the {type(self).__name__} is destroyed")
        return self._shared

    def destroy(self) -> None:
        """Releases it; collective, and for those made with `explicitly_destroy` only."""
        if not self.explicitly_destroy:
            raise ValueError(f"destroy: only of a {type(self).__name__} made with explicitly_destroy")
        shared, self._shared = self._shared, None
        if shared is not None:
            leave(shared)

    def get_comm_stream(self) -> Any:
        """The stream of high throughput; None on the CPU."""
        return self._comm.stream


def _check_room(groups: list[Any], bound: str) -> None:
    """Refuses one more than there may be."""
    if len(groups) == _MOST_GROUPS:
        raise ValueError(f"{bound}, num_experts, hidden: {_MOST_GROUPS} combinations of them are in use, each with "
                         "memory of its own; call with one of these")
