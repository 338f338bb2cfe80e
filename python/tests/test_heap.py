"""Memory that peers map: a group's heap and its tensors, registered tensors, reports."""

import contextlib
import ctypes
import gc
import random
import types
import warnings

import pytest
import torch

import nccl_ep
from nccl_ep import EpGroup, InvalidArgumentError
from nccl_ep.heap import Heap
from nccl_ep.runtime import Runtime

MIB = 1 << 20
_NONE = {"mapped_tensors": 0, "plain_tensors": 0, "fallbacks": 0}


@pytest.fixture
def peers(nodes, rank):
    """The other ranks of this node."""
    return nodes.count(nodes[rank]) - 1


def test_a_heap_gives_each_byte_once():
    """Random tensors, against a list of who has which bytes."""
    dice = random.Random(7)
    heap = Heap(1 << 40, 64 << 10)
    owned: dict[int, int] = {}
    refused = 0
    for _ in range(3000):
        if owned and dice.random() < 0.45:
            offset = dice.choice(sorted(owned))
            del owned[offset]
            heap.give(offset)
            continue
        size = dice.randrange(1, 9000)
        room = -(-size // 512) * 512
        try:
            offset, _ = heap.take(size, None)
        except MemoryError as error:
            refused += 1
            assert heap.largest_free < room and f"has no {room} bytes in one piece left" in str(error)
            continue
        assert offset % 512 == 0 and 0 <= offset <= heap.size - room
        assert all(offset + room <= other or other + taken <= offset for other, taken in owned.items())
        owned[offset] = room
        assert heap.free == heap.size - sum(owned.values())
    assert refused > 100
    for offset in owned:
        heap.give(offset)
    assert heap.free == heap.largest_free == heap.size and not heap.is_used


def test_bytes_of_other_streams_come_with_their_streams():
    heap = Heap(0, 4096)
    first, _ = heap.take(1024, "a")
    second, _ = heap.take(1024, "b")
    heap.use(second + 5, "c")
    heap.give(first)
    heap.give(second)
    assert heap.take(512, "a") == (0, {"b", "c"})
    assert heap.take(2048, "b") == (512, {"a", "c"})


@pytest.fixture
def ep(group, world):
    made = group(num_experts=2 * world[1], hidden=64, max_tokens_per_rank=8, dtype=torch.float32)
    made.heap(MIB + 4096 * world[0])
    return made


def test_tensors_are_cut_from_the_heap(ep, rank, device):
    [piece] = ep.memory()
    assert (piece.object, piece.kind) == (0, "heap")
    assert piece.bytes == piece.free == piece.largest_free == MIB + 4096 * rank
    # Each rank cuts others.
    tensors = [ep.empty((4 + rank, 64)) for _ in range(3)] + [ep.empty(7, torch.int64), ep.empty((2, 0))]
    for number, tensor in enumerate(tensors):
        assert tensor.device == device and tensor.is_contiguous()
        tensor.fill_(number)
    assert [tensor.dtype for tensor in tensors[2:4]] == [torch.float32, torch.int64]
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))
    taken = 3 * -(-(4 + rank) * 64 * 4 // 512) * 512 + 512
    assert ep.memory()[0].free == piece.free - taken
    view = tensors[0][1:]
    del tensors, tensor
    gc.collect()
    assert ep.memory()[0].free == piece.free - (taken - 512) // 3
    del view
    gc.collect()
    assert ep.memory()[0].free == piece.free


def test_a_heap_without_room(ep):
    with pytest.raises(MemoryError, match="heap: has no .* bytes in one piece left"):
        ep.empty(MIB, torch.float64)
    tensor = ep.empty(1000)
    assert tensor.numel() == 1000


def test_what_fails_takes_nothing(ep, monkeypatch):
    free = ep.memory()[0].free
    with pytest.raises(ValueError, match=r"shape: must have no negative extents, not \[-1, 1000\]"):
        ep.empty((-1, 1000))
    with monkeypatch.context() as patch:
        patch.delattr(Runtime, "wait_for")
        with pytest.raises(AttributeError):
            ep.empty(8)
    assert ep.memory()[0].free == free


def test_the_current_stream_is_noted(ep, device, monkeypatch):
    """Memory that it uses is given to another one behind that."""
    others = [torch.cuda.Stream() for _ in range(2)] if device.type == "cuda" else ["one", "two"]
    ids = torch.zeros((1, 1), dtype=torch.int64, device=device)
    current, waited = None, []
    monkeypatch.setattr(Runtime, "current_stream", lambda _: current)
    monkeypatch.setattr(Runtime, "wait_for", lambda _, streams: waited.append(set(streams)))
    with ep.create_handle(ids) as handle:
        out = ep.empty(handle.dispatch(torch.ones((1, 64), device=device)).tokens.shape)
        current = others[0]
        handle.dispatch(torch.ones((1, 64), device=device), out=out)
    del out
    gc.collect()
    current = others[1]
    ep.empty(MIB // 8)
    assert waited == [set(), {None, others[0]}]


def test_refusals(group, world):
    ep = group(num_experts=world[1], hidden=64, max_tokens_per_rank=8)
    with pytest.raises(RuntimeError, match="the group has no heap"):
        ep.empty(8)
    with pytest.raises(ValueError, match="size: must be 1 to"):
        ep.heap(0)
    with pytest.raises(TypeError, match="size: must be an integer"):
        ep.heap(1.5)
    ep.heap(4000)
    with pytest.raises(RuntimeError, match="has one already"):
        ep.heap(4096)
    assert ep.empty(8).dtype == torch.bfloat16
    assert len(ep.empty(2000)) == 2000  # all of it
    with pytest.raises(TypeError, match="dtype: must be a torch.dtype, not int 4"):
        ep.empty(4, 4)
    with pytest.raises(InvalidArgumentError, match="tensor: must be what ncclEpMemRegister took"):
        ep.deregister(ep.empty(8))
    with pytest.raises(TypeError, match="tensor: must be a tensor"):
        ep.register(None)
    with pytest.raises(ValueError, match="tensor: must be contiguous"):
        ep.register(ep.empty((4, 4)).t())


@pytest.mark.high_throughput
def test_operations_find_such_tensors(opened, rank, peers, device):
    """With tensors in the heap and elsewhere on each rank in turn: the same rows, and all counted; but on GPUs a rank
    without peers looks for none."""
    tensors = 0 if peers == 0 and device.type == "cuda" else 2
    problem, ep, handle = opened("ht", bound=32)
    assert ep.statistics() == _NONE
    with handle:
        wanted = handle.dispatch(problem.tokens).tokens
        assert ep.statistics() == _NONE
        ep.heap(MIB)
        for turn in range(4):
            is_mapped = (turn >> (rank % 2)) % 2 == 1
            before = ep.statistics()
            out = ep.empty(wanted.shape) if is_mapped else torch.empty_like(wanted)
            rows = handle.dispatch(problem.tokens, out=out).tokens
            assert rows.data_ptr() == out.data_ptr() and torch.equal(rows, wanted)
            handle.combine(rows).sum().item()  # the device counts fallbacks
            after = ep.statistics()
            counted = {name: after[name] - before[name] for name in after}
            assert counted.pop("fallbacks") <= 2 * is_mapped
            assert counted == {"mapped_tensors": tensors * is_mapped, "plain_tensors": tensors * (not is_mapped)}


def test_registered_tensors(ep, group, world, device):
    """Those of torch on GPUs; on the CPU, where torch has them of no CUDA, those of another group."""
    other = group(num_experts=2 * world[1], hidden=64, max_tokens_per_rank=8)
    plain = torch.zeros(1024, device=device)
    if device.type == "cpu":
        with pytest.raises(InvalidArgumentError, match="tensor: must be memory of cudaMalloc"):
            other.register(plain)
    tensor = ep.empty(1024) if device.type == "cpu" else plain
    other.register(tensor)
    [piece] = other.memory()
    assert (piece.object, piece.kind, piece.bytes, piece.free) == (0, "tensor", 4096, 0)
    assert piece.peers == ep.memory()[0].peers
    tensor.fill_(3)
    other.deregister(tensor)
    assert other.memory() == []
    assert (tensor == 3).all()


def test_tensors_of_symmetric_memory(on_gpu, group, world, peers, device):
    """Torch puts them together of pieces."""
    from torch.distributed import _symmetric_memory as symmetric

    ep = group(num_experts=world[1], hidden=64, max_tokens_per_rank=8)
    tensor = symmetric.empty(4096, dtype=torch.float32, device=device)
    tensor.fill_(world[0])
    ep.register(tensor[1024:])
    [piece] = ep.memory()
    assert (piece.kind, piece.bytes, piece.peers) == ("tensor", 4 * 3072, peers)
    ep.deregister(tensor[1024:])
    assert (tensor == world[0]).all()


def test_a_pool_of_torch(group, world, device):
    ep = group(num_experts=world[1], hidden=64, max_tokens_per_rank=8)
    ep.heap(64 * MIB)
    if device.type == "cpu":
        with pytest.raises(RuntimeError, match="torch has pools on GPUs only"), ep.memory_pool():
            pass
        return
    other = torch.cuda.Stream()
    for _ in range(2):
        with ep.memory_pool(32 * MIB):
            tensors = [torch.ones(1000, device=device) for _ in range(3)]
        beside = torch.ones(1000, device=device)
        library, begin = ep.library, ep.memory()[0]
        for tensor in tensors:
            info = library.ncclEpMemInfo(ep.handle, tensor.data_ptr())
            assert (info.object, info.bytes) == (begin.object, begin.bytes)
            tensor.record_stream(other)
        with pytest.raises(InvalidArgumentError, match="must be in memory of"):
            library.ncclEpMemInfo(ep.handle, beside.data_ptr())
        assert all((tensor == 1).all() for tensor in tensors)
        del tensors, tensor


def as_on_gpus(monkeypatch):
    """Makes the CPU's group say that it has pools; torch's part does nothing."""
    monkeypatch.setattr(EpGroup, "device", torch.device("cuda"))
    monkeypatch.setattr("nccl_ep.heap._allocator", lambda _: types.SimpleNamespace(allocator=lambda: None))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda _: None)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda _, device: contextlib.nullcontext(device.type == "cuda"))


def test_pools_within_pools(group, world, device, monkeypatch):
    """One of the same group changes nothing, of another group it is refused; an error within is not hidden by the end
    of the group."""
    if device.type == "cpu":
        as_on_gpus(monkeypatch)
    alloc = ctypes.CDLL(nccl_ep.NCCLLibrary().path).ncclEpPoolAlloc
    alloc.argtypes, alloc.restype = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    first, second = (group(num_experts=world[1], hidden=64, max_tokens_per_rank=8) for _ in range(2))
    for each in (first, second):
        each.heap(4 * MIB)
    begins = [each._memory._heap.address for each in (first, second)]

    def cuts_from():
        """Which heap the library cuts from now, if any."""
        address = alloc(512, 0, None)
        return [0 <= (address or 0) - begin < 4 * MIB for begin in begins]

    with first.memory_pool():
        with first.memory_pool():
            assert cuts_from() == [True, False]
        with pytest.raises(RuntimeError, match="another group's"), second.memory_pool():
            pass
        assert cuts_from() == [True, False]
    assert cuts_from() == [False, False]
    with pytest.raises(ZeroDivisionError), second.memory_pool():
        assert cuts_from() == [False, True]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            second.close()
        1 / 0  # noqa: B018
    with first.memory_pool():
        assert cuts_from() == [True, False]
    assert cuts_from() == [False, False]
    monkeypatch.delattr(torch.cuda, "MemPool")
    with pytest.raises(RuntimeError, match=r"memory_pool: PyTorch .* has no torch.cuda.MemPool"), first.memory_pool():
        pass


def test_a_group_ends_before_its_tensors(world):
    ep = EpGroup(num_experts=world[1], hidden=64, max_tokens_per_rank=8)
    ep.heap(4096)
    kept = ep.empty(8)
    with pytest.warns(ResourceWarning, match="the group's heap is gone"):
        ep.close()
    del kept
    assert ep.memory() == [] and ep.statistics() == _NONE
    with pytest.raises(RuntimeError, match="the group has no heap"):
        ep.empty(8)
    with pytest.raises(RuntimeError, match="the group is closed"):
        ep.heap(4096)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with EpGroup(num_experts=world[1], hidden=64, max_tokens_per_rank=8) as again:
            again.heap(4096)
            again.empty(8)


def test_capabilities(device):
    found = nccl_ep.capabilities()
    assert nccl_ep.capabilities() == found  # no module has the function's name
    assert found["backend"] == device.type and found["peer_memory"]
    assert found["version"] == nccl_ep.NCCLLibrary().ncclEpGetVersion()
