"""Memory that peers map: a heap that ranks reserve together and each cuts alone, and tensors of the caller's."""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import functools
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nccl_ep.arguments import integer, require_dtype, require_tensor
from nccl_ep.views import bytes_at

if TYPE_CHECKING:
    from nccl_ep.group import EpGroup

_ALIGN = 512  # as torch's allocator does
_MOST_BYTES = 2**63 - 1
_OF_THREAD = threading.local()  # `used`: whose `memory_pool` it is in


@dataclasses.dataclass
class _Range:
    """Bytes of a heap, and the streams whose work so far may still use them."""

    offset: int
    size: int
    streams: set[Any] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class MappedMemory:
    """One piece of memory that peers map."""

    object: int  # its number, the same on all ranks
    bytes: int  # on this rank
    peers: int  # other ranks that map it
    kind: str  # "heap" or "tensor"
    free: int  # bytes that a heap has left
    largest_free: int  # the most of them in one piece
    tensors: int  # of operations, that were found in it


class Heap:
    """Some bytes at an address, of which tensors get pieces that go back when they die."""

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size
        self._free = [_Range(0, size)]
        self._taken: dict[int, _Range] = {}
        # A tensor may die at any moment, in the middle of a method here, too.
        self._returned: collections.deque[int] = collections.deque()

    def take(self, size: int, stream: Any) -> tuple[int, set[Any]]:
        """The offset of `size` bytes for work on `stream`, and streams that it must wait for; raises MemoryError."""
        self._collect()
        size = -(-size // _ALIGN) * _ALIGN
        fitting = [free for free in self._free if free.size >= size]
        if not fitting:
            raise MemoryError(f"heap: has no {size} bytes in one piece left, but {self.largest_free}, and {self.free} "
                              f"of {self.size} in all")
        found = min(fitting, key=lambda free: free.size)
        taken = _Range(found.offset, size, {stream})
        self._taken[taken.offset] = taken
        found.offset += size
        found.size -= size
        if found.size == 0:
            self._free.remove(found)
        return taken.offset, found.streams - {stream}

    def give(self, offset: int) -> None:
        """Takes the bytes of a tensor back, whenever that is."""
        self._returned.append(offset)

    def use(self, address: int, stream: Any) -> None:
        """What is at `address` is used on `stream`, too."""
        for taken in self._taken.values():
            if taken.offset <= address - self.address < taken.offset + taken.size:
                taken.streams.add(stream)

    @property
    def free(self) -> int:
        """Bytes that are left."""
        self._collect()
        return sum(free.size for free in self._free)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest piece that is left."""
        self._collect()
        return max((free.size for free in self._free), default=0)

    @property
    def is_used(self) -> bool:
        """Whether a tensor has some of them."""
        self._collect()
        return bool(self._taken)

    def _collect(self) -> None:
        while self._returned:
            returned = self._taken.pop(self._returned.popleft())
            at = bisect.bisect([free.offset for free in self._free], returned.offset)
            self._free.insert(at, returned)
            for left in (at, at - 1):
                self._join(left)

    def _join(self, at: int) -> None:
        """Merges the free ranges `at` and after it, if they are neighbours."""
        if not 0 <= at < len(self._free) - 1:
            return
        left, right = self._free[at:at + 2]
        if left.offset + left.size == right.offset:
            self._free[at:at + 2] = [_Range(left.offset, left.size + right.size, left.streams | right.streams)]


@functools.cache
def _allocator(library: str) -> Any:
    """Torch's side of the library's two functions. Tensors may outlive their group, and before torch 2.11 a pool does
    not keep its allocator; so it stays."""
    return torch.cuda.memory.CUDAPluggableAllocator(library, "ncclEpPoolAlloc", "ncclEpPoolFree")


@dataclasses.dataclass
class _Pool:
    """A pool of torch's, and the bytes of the heap that it cuts."""

    of_torch: Any
    address: int
    size: int


class PeerMemory:
    """What of a group's memory peers map."""

    def __init__(self, group: EpGroup) -> None:
        self._group: EpGroup = weakref.proxy(group)
        self._heap: Heap | None = None
        self._tensors: dict[int, torch.Tensor] = {}
        self._pool: _Pool | None = None

    def reserve(self, size: int) -> None:
        """Makes the heap; collective."""
        # Whole pieces, so that nothing is left over.
        size = -(-integer("size", size, 1, _MOST_BYTES - _ALIGN) // _ALIGN) * _ALIGN
        if self._heap is not None:
            raise RuntimeError("heap: the group has one already")
        self._heap = Heap(self._collective("ncclEpMemAlloc", size), size)
        self._group.runtime.note_use = self.use

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the heap."""
        heap, runtime = self._heap, self._group.runtime
        if heap is None or not self._group.is_open:
            raise RuntimeError("empty: the group has no heap; call group.heap(size) on all ranks first")
        require_dtype("dtype", dtype, (dtype,))
        shape = torch.Size([shape] if isinstance(shape, int) else shape)
        if min(shape, default=0) < 0:
            raise ValueError(f"shape: must have no negative extents, not {list(shape)}")
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype, device=self._group.device)
        if runtime.is_capturing(None):
            raise RuntimeError("empty: tensors in the heap are made before a capture, as the graph uses them again")
        with self._taken(heap, size) as offset:
            memory, flat = bytes_at(heap.address + offset, size, self._group.device)
            made = flat.view(dtype).view(shape)
            weakref.finalize(memory, heap.give, offset)
        return made

    @contextlib.contextmanager
    def _taken(self, heap: Heap, size: int) -> Iterator[int]:
        """The offset of bytes for the current stream, which go back if what is done with them fails."""
        runtime = self._group.runtime
        offset, others = heap.take(size, runtime.current_stream())
        try:
            runtime.wait_for(others)
            yield offset
        except BaseException:
            heap.give(offset)
            raise

    @contextlib.contextmanager
    def pool(self, size: int | None) -> Iterator[Any]:
        """What torch allocates in this thread meanwhile comes from the heap."""
        group, heap = self._group, self._heap
        if heap is None:
            raise RuntimeError("memory_pool: the group has no heap; call group.heap(size) on all ranks first")
        if group.device.type == "cpu":
            raise RuntimeError("memory_pool: torch has pools on GPUs only; group.empty makes tensors in the heap")
        if not hasattr(torch.cuda, "MemPool"):
            raise RuntimeError(f"memory_pool: PyTorch {torch.__version__} has no torch.cuda.MemPool, and from 2.6 on "
                               "it does; group.empty makes tensors in the heap")
        outer = getattr(_OF_THREAD, "used", None)
        if outer is not None and outer is not self:
            raise RuntimeError("memory_pool: within another group's, from which torch would go on to allocate")
        if self._pool is None:
            size = integer("size", heap.largest_free if size is None else size, 1, heap.size)
            with self._taken(heap, size) as offset:
                pool = torch.cuda.MemPool(_allocator(group.library.path).allocator())
            self._pool = _Pool(pool, heap.address + offset, size)
        if outer is self:
            yield self._pool.of_torch
            return
        self._cut_from(self._pool)
        _OF_THREAD.used = self
        try:
            with torch.cuda.use_mem_pool(self._pool.of_torch, device=group.device):
                yield self._pool.of_torch
        finally:
            _OF_THREAD.used = None
            if group.is_open:  # from memory of one that has ended the library cuts nothing
                self._cut_from(None)

    def _cut_from(self, pool: _Pool | None) -> None:
        """From now on the library cuts what torch allocates in this thread from `pool`."""
        group, (address, size) = self._group, (None, 0) if pool is None else (pool.address, pool.size)
        group.library.ncclEpPoolUse(group.handle, address, size)

    def use(self, tensors: Iterable[torch.Tensor], stream: Any) -> None:
        """These tensors are used on `stream`, too, wherever they are; None is the current one."""
        if self._heap is not None:
            stream = self._group.runtime.current_stream() if stream is None else stream
            for tensor in tensors:
                self._heap.use(tensor.data_ptr(), stream)

    def register(self, tensor: torch.Tensor) -> None:
        """Lets peers map the memory of a tensor; collective."""
        require_tensor("tensor", tensor)
        if not tensor.is_contiguous():
            raise ValueError("tensor: must be contiguous")
        if tensor.device != self._group.device:
            raise ValueError(f"tensor: is on {tensor.device}, the group on {self._group.device}")
        address = tensor.data_ptr()
        self._collective("ncclEpMemRegister", address, tensor.nbytes)
        self._tensors[address] = tensor

    def deregister(self, tensor: torch.Tensor) -> None:
        """Ends that; collective."""
        require_tensor("tensor", tensor)
        self._collective("ncclEpMemDeregister", address := tensor.data_ptr())
        self._tensors.pop(address, None)

    def _collective(self, name: str, *arguments: Any) -> Any:
        group = self._group
        return group.runtime.interruptible(group.call, getattr(group.library, name), group.handle, *arguments)

    def report(self) -> list[MappedMemory]:
        """Each piece, by its number."""
        heap = self._heap
        pieces = [] if heap is None else [self._piece(heap.address, "heap", heap.free, heap.largest_free)]
        pieces += [self._piece(address, "tensor", 0, 0) for address in self._tensors]
        return sorted(pieces, key=lambda piece: piece.object)

    def _piece(self, address: int, kind: str, free: int, largest: int) -> MappedMemory:
        info = self._group.library.ncclEpMemInfo(self._group.handle, address)
        return MappedMemory(info.object, info.bytes, info.peers, kind, free, largest, info.tensors)

    def elsewhere(self) -> tuple[int, int]:
        """Tensors of operations that were in none, and operations that could not use one where it was."""
        addresses = [] if self._heap is None else [self._heap.address]
        for address in (*addresses, *self._tensors):
            info = self._group.library.ncclEpMemInfo(self._group.handle, address)
            return int(info.plain_tensors), int(info.fallbacks)
        return 0, 0

    def end(self) -> bool:
        """The group ends, and with it the memory; whether a tensor still has some of it."""
        heap, self._heap = self._heap, None
        pool, self._pool = self._pool, None
        self._tensors.clear()
        if heap is not None and pool is not None:
            heap.give(pool.address - heap.address)
        return heap is not None and heap.is_used
