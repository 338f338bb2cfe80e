"""FlashInfer's split layer, its own files, over NVIDIA's `nccl.ep` package and `libnccl_ep.so.0`, which are preloaded.

Of FlashInfer's wheel only `flashinfer/moe_ep` is loaded. Experts are plain torch, through the interface that it has for
kernels; without GPUs, the few answers that it asks of `torch.cuda` are given here.
"""

import ctypes
import importlib
import sys
import types

import pytest
import torch

from loading import folder, forget, routing, without_gpu
from problems import captured, weighted

pytestmark = pytest.mark.high_throughput
# One of the sizes that FlashInfer lets through in low latency.
HIDDEN, MOST, TOP_K, LOCAL = 2048, 12, 3, 3
WAYS = {"ll": ("LOW_LATENCY", "EXPERT_MAJOR"), "rank": ("LOW_LATENCY", "RANK_MAJOR"),
        "ht": ("HIGH_THROUGHPUT", "EXPERT_MAJOR")}


class OnDevice(torch.Tensor):
    """FlashInfer updates a handle with ids on a GPU alone."""

    is_cuda = True


@pytest.fixture(scope="module")
def moe_ep(device):
    """`flashinfer.moe_ep`, without what `flashinfer` itself would load."""
    place = folder("flashinfer/moe_ep")
    if not hasattr(ctypes.CDLL(None), "ncclEpInitHandle"):
        pytest.skip("no libnccl_ep.so.0 is preloaded")
    pytest.importorskip("nccl.ep", reason="no package nccl.ep")
    package = types.ModuleType("flashinfer")
    package.__path__ = [str(place / "flashinfer")]
    sys.modules["flashinfer"] = package
    with pytest.MonkeyPatch.context() as patch:
        if without_gpu(patch, device):
            _wait_in_each_call(patch)
        module = importlib.import_module("flashinfer.moe_ep")
        _add_kernels()
        yield module
    forget("flashinfer")


def _wait_in_each_call(patch):
    """Stand-ins run streams on threads, and torch reads memory of the CPU at once."""
    handle = sys.modules["nccl.ep"].Handle
    for name in ("update", "dispatch", "combine", "complete"):
        def call(self, *words, done=getattr(handle, name), **more):
            done(self, *words, **more)
            assert ctypes.CDLL(None).cudaStreamSynchronize(None) == 0

        patch.setattr(handle, name, call)


class Experts:
    """Experts of one rank by plain torch, each a tanh of the row times a vector; and what the rank sends to them."""

    backend_name = kernel_name = "plain"

    def __init__(self, world, device, width=HIDDEN, dtype=torch.bfloat16):
        self.rank, self.size = world
        self.device, self.width, self.dtype = device, width, dtype
        random = torch.Generator().manual_seed(5)
        self.vectors = torch.randn((LOCAL * self.size, HIDDEN), generator=random).to(device)

    def sent(self, tokens):
        """The rows that travel: fewer values, or their bytes."""
        return tokens[:, :self.width].contiguous().view(self.dtype)

    def result(self, expert, rows):
        rows = rows.view(torch.bfloat16).float()
        return torch.tanh(rows.repeat(1, HIDDEN // self.width) * self.vectors[expert])

    def sum(self, rows, ids, weights):
        return weighted(rows, ids, weights, len(self.vectors), self.result)

    def step(self, seed, tokens=None):
        """Rows, ids with gaps and weights, made from one seed: uneven numbers of tokens, or none of a rank."""
        random = torch.Generator().manual_seed(100 * seed + self.rank)
        if tokens is None:
            tokens = 0 if self.rank == seed % (self.size + 1) else MOST - 3 * self.rank % MOST - seed
        rows = torch.randn((tokens, HIDDEN), generator=random).bfloat16()
        chosen = routing(random, tokens, LOCAL * self.size, TOP_K, lost=0.2)
        return [each.to(self.device) for each in (rows, *chosen)]

    def check(self, got, rows, ids, weights):
        torch.testing.assert_close(got.float(), self.sum(self.sent(rows), ids, weights), rtol=5e-2, atol=5e-2)

    def compute(self, ctx):
        first = self.rank * LOCAL
        tensors = ctx.expert_tensors
        if ctx.recv_topk_idx is None:  # each block is of one expert
            blocks = [self.result(first + each, block) for each, block in enumerate(tensors)]
            return torch.stack(blocks).bfloat16()
        rows = tensors.reshape(-1, tensors.shape[-1])
        ids = ctx.recv_topk_idx.long()
        ids = torch.where((ids >= 0) & (ids < LOCAL), ids + first, -1)
        return self.sum(rows, ids, ctx.recv_topk_weights).bfloat16().view(*tensors.shape[:2], HIDDEN)


def _add_kernels():
    registry = importlib.import_module("flashinfer.moe_ep.core.kernel.registry")
    base = importlib.import_module("flashinfer.moe_ep.core.kernel.base")

    @registry.register_split_kernel("plain")
    class Plain(base.SplitKernelBackend):
        def __init__(self, config):
            super().__init__(config)
            self.experts = config

        @classmethod
        def kernel_name(cls):
            return "plain"

        @classmethod
        def requires_weights(cls):
            return False

        def pack_dispatch_payload(self, hidden_states):
            return self.experts.sent(hidden_states)

        def compute(self, ctx):
            return self.experts.compute(ctx)


@pytest.fixture
def made():
    """Layers and fleets, which are destroyed after the test, on all ranks."""
    each = []
    yield each
    for it in each:
        it.destroy()


def parameters(moe_ep, way, size):
    algorithm, layout = WAYS[way]
    return moe_ep.FleetParams(num_experts=LOCAL * size, max_tokens_per_rank=MOST, token_hidden_size=HIDDEN,
                              algorithm=moe_ep.EpAlgorithm[algorithm], layout=moe_ep.EpLayout[layout])


@pytest.fixture
def layer(moe_ep, made, world, device):
    def make(way, experts):
        made.append(moe_ep.MoEEpLayer(
            moe_ep.BootstrapConfig(world_size=world[1], rank=world[0], device=device.index),
            parameters(moe_ep, way, world[1]), moe_ep.dummy_moe_weights(num_local_experts=LOCAL, hidden=HIDDEN),
            backend=moe_ep.SplitConfig(comm=moe_ep.NcclEpConfig(), kernel=experts)))
        return made[-1]

    return make


@pytest.fixture
def fleet(moe_ep, made, world):
    def make(way, *knobs, **more):
        made.append(moe_ep.create_fleet(moe_ep.BootstrapConfig(world[1], world[0], **more),
                                        parameters(moe_ep, way, world[1]), knobs))
        return made[-1]

    return make


@pytest.mark.parametrize("width, dtype", [(HIDDEN, torch.bfloat16), (HIDDEN // 2, torch.bfloat16),
                                          (HIDDEN // 4, torch.uint8)])
@pytest.mark.parametrize("way", WAYS)
def test_layer(moe_ep, layer, world, device, way, width, dtype):
    """A handle for each step, destroyed while the stream may still run it; rows that travel narrower than results."""
    experts = Experts(world, device, width, dtype)
    each = layer(way, experts)
    with torch.inference_mode():
        for seed in range(3):
            rows, ids, weights = experts.step(seed)
            got = each.forward(moe_ep.MoEEpTensors(rows, ids, weights))
            experts.check(got, rows, ids, weights)


@pytest.mark.parametrize("way", WAYS)
def test_graph_state(moe_ep, layer, world, device, way):
    """One handle, updated in each step: with the same tensors, on GPUs in a captured graph."""
    experts = Experts(world, device)
    each = layer(way, experts)
    kept = experts.step(0, MOST - world[0])
    if device.type == "cpu":
        kept[1] = kept[1].as_subclass(OnDevice)
    tensors = moe_ep.MoEEpTensors(*kept)
    state = each.create_graph_state(tensors)
    experts.check(each.forward(tensors, graph_state=state), *kept)
    graph = None
    if device.type != "cpu":
        graph, _ = captured(lambda: each.forward(tensors, graph_state=state))
    for seed in range(1, 4):
        for to, new in zip(kept, experts.step(seed, MOST - world[0])):
            to.copy_(new)
        if graph is None:
            each.forward(tensors, graph_state=state)
        else:
            graph.replay()
        experts.check(state.out, *(tensor.as_subclass(torch.Tensor) for tensor in kept))
    if device.type != "cpu":
        torch.cuda.synchronize()


def run(moe_ep, each, experts, tensors, *knobs):
    """A step by hand."""
    rows, ids, weights = tensors
    handle = each.create_handle(moe_ep.HandleParams(ids), [moe_ep.HandleAlgoKnobTopKWeights(weights), *knobs])
    received = handle.dispatch(moe_ep.DispatchInputParams([rows]))
    context = moe_ep.SplitKernelContext(received.expert_tensors, received.get_num_tokens(), each.params,
                                        received.recv_topk_idx, received.recv_topk_weights, received.expert_counts)
    got = handle.combine(moe_ep.CombineInputParams([experts.compute(context)])).x
    handle.complete()
    handle.destroy()
    return got, received


@pytest.mark.parametrize("way", WAYS)
def test_staged(moe_ep, fleet, world, device, way):
    """The phases of an operation apart; a fleet on another one's communicator."""
    experts = Experts(world, device)
    first = fleet(way)
    for each in (first, fleet(way, nccl_comm=first._comm.ptr)):
        tensors = experts.step(2)
        got, _ = run(moe_ep, each, experts, tensors, moe_ep.HandleAlgoKnobSplitOperation())
        experts.check(got, *tensors)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_received_rows(moe_ep, fleet, world, device, dtype):
    """High throughput counts the rows that come, which are packed."""
    experts = Experts(world, device)
    each = fleet("ht")
    counter = torch.full((1,), -1, dtype=dtype, device=device)
    tensors = experts.step(1)
    got, received = run(moe_ep, each, experts, tensors, moe_ep.HandleAlgoKnobNumReceivedTokens(counter))
    experts.check(got, *tensors)
    mine = 0
    for rank in range(world[1]):
        other = Experts((rank, world[1]), device).step(1)[1]
        mine += int((other // LOCAL == world[0]).any(1).sum())
    assert int(received.recv_total_counter) == mine


@pytest.mark.parametrize("way", WAYS)
def test_allocator(moe_ep, fleet, world, device, way):
    """Memory of the group from a function of the caller: on GPUs from PyTorch's allocator."""
    ep = importlib.import_module("nccl.ep")
    knob, live = moe_ep.FleetAlgoKnobAllocator(torch_caching=True), {}
    if device.type == "cpu":
        @ep.AllocFn
        def take(out, size, _context):
            memory = torch.empty(size + 512, dtype=torch.uint8)
            out[0] = ctypes.c_void_p(-(-memory.data_ptr() // 512) * 512)
            live[out[0]] = memory
            return 0

        @ep.FreeFn
        def free(address, _context):
            return 0 if live.pop(address, None) is not None else 1

        knob = moe_ep.FleetAlgoKnobAllocator(alloc_fn=ctypes.cast(take, ctypes.c_void_p).value,
                                             free_fn=ctypes.cast(free, ctypes.c_void_p).value)
    experts = Experts(world, device)
    each = fleet(way, knob)
    tensors = experts.step(1)
    experts.check(run(moe_ep, each, experts, tensors)[0], *tensors)
    each.destroy()
    assert not live


def test_fault_tolerance(moe_ep, fleet):
    """Not served: FlashInfer finds the functions and asks for a group with masks, which is refused."""
    assert moe_ep.supports_fault_tolerance("nccl_ep")
    with pytest.raises(Exception, match="code 5"):
        fleet("ll", moe_ep.FleetAlgoKnobFaultTolerance())
