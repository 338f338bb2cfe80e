"""TransformerEngine's `pytorch/ep.py` and `libtransformer_engine.so`, both as published, over `libnccl_ep.so.0`.

Its PyTorch extension, which is published as sources, has here the few lines of its `ep_*` functions. Without GPUs its
library links to functions that do nothing, except for those of CUDA and NCCL that the stand-ins have.
"""

import ctypes
import importlib
import os
import pathlib
import sys
import tempfile
import types

import pytest
import torch

from loading import folder, modules, routing, without_gpu
from problems import weighted

pytestmark = pytest.mark.high_throughput
HIDDEN, MOST, TOP_K, LOCAL, ALIGNMENT = 512, 12, 3, 3, 16
_EP = "transformer_engine.pytorch.ep"
_LIBRARY = "transformer_engine/wheel_lib/libtransformer_engine.so"
_TYPES = {torch.uint8: 0, torch.int32: 2, torch.int64: 3, torch.float32: 4, torch.float16: 5, torch.bfloat16: 6,
          torch.float8_e4m3fn: 7}
_E8M0, _MXFP8 = 9, 1


class Basic(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int), ("sizes", ctypes.c_size_t * 15),
                ("dimensions", ctypes.c_size_t)]


class Window(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("window", "offset", "scale_window", "scale_offset")]


class GroupConfig(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), *((name, ctypes.c_int) for name in (
        "ep_size", "num_experts", "max_tokens_per_rank", "max_recv_tokens_per_rank", "hidden_dim", "num_comm_sms",
        "max_token_dtype", "zero_copy", "num_topk", "drop_on_overflow"))]


class LayerConfig(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("top_k", ctypes.c_int), ("alignment", ctypes.c_size_t)]


class Extension(types.ModuleType):
    """The extension's functions, each a call of the library."""

    def __init__(self, library, world, wait):
        super().__init__("transformer_engine_torch")
        self.te, self.world, self.wait, self.fused = library, world, wait, False
        library.nvte_create_tensor.restype = ctypes.c_void_p
        library.nvte_ep_handle_mem_size.restype = ctypes.c_size_t

    def ep_initialize(self, comm, _name, experts, most, most_received, hidden, sms, dtype, *more):
        config = GroupConfig(ctypes.sizeof(GroupConfig), self.world[1], experts, most, most_received, hidden, sms,
                             _TYPES[dtype], *map(int, more))
        self.te.nvte_ep_initialize(ctypes.c_void_p(comm), ctypes.byref(config))

    def ep_finalize(self):
        self.te.nvte_ep_shutdown()

    def ep_get_zero_copy(self):
        return False

    def ep_handle_mem_size(self, top_k, alignment):
        return self.te.nvte_ep_handle_mem_size(self._layer(top_k, alignment))

    def ep_prepare(self, memory, ids, counts, top_k, alignment, total):
        self._call("prepare", memory, ids, counts, total, self._layer(top_k, alignment))

    def ep_dispatch(self, memory, ids, tokens, weights, rows, row_weights, scales=None, row_scales=None):
        self._call("dispatch", memory, ids, (tokens, scales), Window(), weights, Window(), (rows, row_scales),
                   Window(), row_weights, Window())

    def ep_prepare_and_dispatch(self, memory, ids, tokens, weights, counts, total, top_k, alignment, rows=None,
                                row_weights=None, row_scales=None, tokens_scale_inv=None):
        scales = tokens_scale_inv
        if self.fused and rows is not None:
            self._call("prepare_and_dispatch", memory, ids, (tokens, scales), Window(), weights, Window(),
                       (rows, row_scales), Window(), row_weights, Window(), counts, total,
                       self._layer(top_k, alignment))
            return []
        self.ep_prepare(memory, ids, counts, top_k, alignment, total)
        made = rows is None
        if made:
            torch.cuda.current_stream().synchronize()
            rows = tokens.new_empty(int(total), tokens.shape[1])
            row_weights = weights.new_empty(int(total))
        self.ep_dispatch(memory, ids, tokens, weights, rows, row_weights, scales, row_scales)
        return [rows, row_weights] if made else []

    def ep_combine(self, memory, rows, result):
        self._call("combine", memory, rows, Window(), result)

    def ep_dispatch_bwd(self, memory, rows, row_weights, tokens, weights):
        self._call("dispatch_bwd", memory, rows, Window(), row_weights, Window(), tokens, weights)

    def ep_combine_bwd(self, memory, tokens, rows, scales=None, row_scales=None):
        self._call("combine_bwd", memory, (tokens, scales), Window(), (rows, row_scales), Window())

    def _layer(self, top_k, alignment):
        return ctypes.byref(LayerConfig(ctypes.sizeof(LayerConfig), top_k, alignment))

    def _call(self, name, *words):
        given = [self._tensor(word) if isinstance(word, (torch.Tensor, tuple)) else word for word in words]
        getattr(self.te, f"nvte_ep_{name}")(*given, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        self.wait()

    def _tensor(self, word):
        data, scales = word if isinstance(word, tuple) else (word, None)
        tensor = ctypes.c_void_p(self.te.nvte_create_tensor(0 if scales is None else _MXFP8))
        for param, each in ((0, data), (4, scales)):
            if each is not None:
                dtype = _E8M0 if param else _TYPES[each.dtype]
                sizes = (ctypes.c_size_t * 15)(*each.shape)
                basic = Basic(each.data_ptr(), dtype, sizes, each.dim())
                self.te.nvte_set_tensor_param_v2(tensor, param, ctypes.byref(basic), ctypes.sizeof(basic))
        return tensor


@pytest.fixture(scope="module")
def loaded(world, device):
    """`ep.py`, the extension's stand-in, and what it needs of the process group."""
    place = folder("transformer_engine/pytorch/ep.py")
    library = folder(_LIBRARY, fetched_by="make test-engines LARGE=1") / _LIBRARY
    if world[1] == 1:
        pytest.skip("it refuses a group of one rank")
    if device.type == "cpu" and "LD_PRELOAD" not in os.environ:
        pytest.skip("no stand-ins are preloaded")
    # Nothing else of the engine communicates without zero copies.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as home, modules(place, {_EP}, {}):
        _make_home(pathlib.Path(home))
        # Headers that NVIDIA's library compiles its kernels with: it wants to know them, nothing here reads them.
        for name in ("HOME", "JIT_BUILD_INCLUDE_DIR", "JIT_CUDA_INCLUDE_DIR"):
            patch.setenv(f"NCCL_EP_{name}", home)
        wait = _wait_in_each_call(patch) if without_gpu(patch, device) else lambda: None
        extension = Extension(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL), world, wait)
        patch.setitem(sys.modules, extension.__name__, extension)
        ep = importlib.import_module(_EP)
        if device.type == "cpu":
            patch.setattr(ep, "_check_nccl_runtime_version", lambda: None)  # PyTorch's NCCL is a placeholder here
        try:
            ep._check_nccl_runtime_version()
        except RuntimeError as error:
            pytest.skip(str(error))
        # PyTorch 2.11 drops the last arguments that are None, and then looks for those that the operation changes.
        for operation in ("prepare", "prepare_and_dispatch", "combine", "dispatch_bwd", "combine_bwd"):
            patch.setattr(torch.ops.transformer_engine_ep, operation, getattr(ep, f"_{operation}_op")._init_fn)
        yield ep, extension


def _make_home(home):
    """The folder in which it looks for the library, as an installation has it."""
    first = pathlib.Path(os.environ["NCCL_EP_LIBRARY"])
    prebuilt = first.parents[1] / "second" / "libnccl_ep.so.0"  # in a folder of `make gpu-package`
    library = prebuilt if prebuilt.exists() else first.with_name("libnccl_ep_2.so")
    (home / "lib").mkdir()
    (home / "lib" / "libnccl_ep.so.0").symlink_to(library)


def _wait_in_each_call(patch):
    """Stand-ins run streams on threads, and torch reads memory of the CPU at once."""
    empty = torch.empty
    patch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **more: empty(*sizes, **more))
    patch.setattr(torch.distributed, "barrier", lambda **_: None)
    return lambda: ctypes.CDLL(None).cudaStreamSynchronize(None)


@pytest.fixture
def bootstrapped(loaded, world, device, request):
    """`ep.py` with a group, which it closes after the test."""
    ep, extension = loaded
    if device.type == "cpu":
        comm = ctypes.cast(request.getfixturevalue("comm"), ctypes.c_void_p).value
        backend = types.SimpleNamespace(_comm_ptr=lambda: comm)
        group = types.SimpleNamespace(size=lambda: world[1], group_name="ep", _get_backend=lambda _: backend)
    else:
        group = torch.distributed.new_group(backend="nccl")

    def make(rows, fused=False, **more):
        extension.fused = fused
        ep.ep_bootstrap(group, LOCAL * world[1], MOST, HIDDEN, TOP_K, rows, **more)
        # Not the one that it brings.
        assert "wheel_lib/libnccl_ep" not in pathlib.Path("/proc/self/maps").read_text()
        return ep.EpBuffer(TOP_K, MOST, HIDDEN, LOCAL, rows, ALIGNMENT, device=device), ep

    yield make
    ep.ep_finalize()


class Step:
    """A forward pass of one micro-batch, checked; `backward` checks its gradients."""

    def __init__(self, ep, buffer, world, device, number, dtype=torch.int64):
        random = torch.Generator().manual_seed(7)
        vectors = torch.randn((LOCAL * world[1], HIDDEN), generator=random).to(device)
        own = vectors[world[0] * LOCAL:][:LOCAL]
        random.manual_seed(100 * number + world[0])
        count = MOST - 3 * ((world[0] + number) % 4)
        tokens, self.grad = (torch.randn((count, HIDDEN), generator=random).bfloat16().to(device) for _ in range(2))
        ids, weights = routing(random, count, len(vectors), TOP_K, lost=0.1)
        ids, weights = ids.to(device, dtype), weights.to(device)
        self.given = [each.clone().requires_grad_() for each in (tokens, weights)]
        self.wanted = [each.clone().requires_grad_() for each in (tokens.float(), weights)]
        received, factors, counts = ep.ep_dispatch(buffer, self.given[0], ids, self.given[1])
        total = int(buffer.total_recv_tokens)
        assert total == int(counts.sum()) and not (counts % ALIGNMENT).any()
        parts = torch.tanh(received[:total].float() * own.repeat_interleave(counts, 0)) * factors[:total, None]
        results = torch.nn.functional.pad(parts, (0, 0, 0, len(received) - total)).bfloat16()
        self.got = ep.ep_combine(buffer, results, num_local_tokens=count)
        self.want = weighted(self.wanted[0], ids, self.wanted[1], len(vectors),
                             lambda expert, rows: torch.tanh(rows * vectors[expert]))
        torch.testing.assert_close(self.got.float(), self.want, rtol=5e-2, atol=5e-2)

    def backward(self):
        for each in (self.got, self.want):
            (each.float() * self.grad.float()).sum().backward()
        tokens, weights = zip(self.given, self.wanted)
        torch.testing.assert_close(tokens[0].grad.float(), tokens[1].grad, rtol=6e-2, atol=6e-2)
        torch.testing.assert_close(weights[0].grad, weights[1].grad, rtol=5e-2, atol=0.5)


@pytest.mark.parametrize("rows, fused", [(None, False), (4096, False), (4096, True)], ids=["eager", "bound", "fused"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_layer(bootstrapped, world, device, rows, fused, dtype):
    """Forward and backward, several steps: exactly what comes, within a bound, and counted by the dispatch."""
    buffer, ep = bootstrapped(rows, fused)
    for number in range(3):
        Step(ep, buffer, world, device, number, dtype).backward()


@pytest.mark.parametrize("rows", [None, 4096], ids=["eager", "bound"])
def test_micro_batches(bootstrapped, world, device, rows):
    """Several passes on the way, each with memory of its own for the routing, as Megatron-Core's `ncclep` has it."""
    first, ep = bootstrapped(rows)
    buffers = [first, *(ep.EpBuffer(TOP_K, MOST, HIDDEN, LOCAL, rows, ALIGNMENT, device=device) for _ in range(2))]
    steps = [Step(ep, buffer, world, device, number) for number, buffer in enumerate(buffers)]
    for step in (steps[1], steps[0], steps[2]):
        step.backward()


def test_moved_routing(bootstrapped, loaded, world, device):
    """Operations on a copy of the routing's memory, which XLA may move."""
    (buffer, ep), extension = bootstrapped(4096), loaded[1]
    ids = torch.arange(MOST * TOP_K, device=device).view(MOST, TOP_K) % (LOCAL * world[1])
    ep.ep_prepare(buffer, ids)
    moved = buffer.handle_mem.clone()
    buffer.handle_mem.fill_(255)
    tokens = torch.randn((MOST, HIDDEN), device=device).bfloat16()
    rows, weights = tokens.new_empty(4096, HIDDEN), torch.ones(ids.shape, device=device)
    extension.ep_dispatch(moved, ids, tokens, weights, rows, weights.new_empty(4096))
    result = torch.empty_like(tokens)
    extension.ep_combine(moved, rows, result)
    torch.testing.assert_close(result.float(), TOP_K * tokens.float(), rtol=2e-2, atol=2e-2)


def scaled(rank, size, device):
    """Tokens of a rank as bytes, with a scale for each 32 of them, and their ids."""
    random = torch.Generator().manual_seed(90 + rank)
    count = MOST - 2 * rank
    data, scales = (torch.randint(1, 127, (count, width), generator=random, dtype=torch.uint8).to(device)
                    for width in (HIDDEN, HIDDEN // 32))
    return data, scales, routing(random, count, LOCAL * size, TOP_K, lost=0)[0].to(device)


@pytest.mark.parametrize("backward", [False, True])
def test_mxfp8(bootstrapped, loaded, world, device, backward):
    """Bytes and scales arrive as they were sent, by expert, source rank and token; other slots of an expert get 0."""
    (buffer, ep), extension = bootstrapped(4096), loaded[1]
    data, scales, ids = scaled(*world, device)
    counts = ep.ep_prepare(buffer, ids)
    rows, row_scales = (torch.full((4096, width), 255, dtype=torch.uint8, device=device)
                        for width in (HIDDEN, HIDDEN // 32))
    given, got = data.view(torch.float8_e4m3fn), rows.view(torch.float8_e4m3fn)
    if backward:
        extension.ep_combine_bwd(buffer.handle_mem, given, got, scales, row_scales)
    else:
        weights = torch.ones(ids.shape, device=device)
        extension.ep_dispatch(buffer.handle_mem, ids, given, weights, got, weights.new_empty(4096), scales, row_scales)
    wanted = [[], []]
    for expert in range(world[0] * LOCAL, (world[0] + 1) * LOCAL):
        for to, whose in zip(wanted, (0, 1)):
            sent = [each[whose][(each[2] == expert).any(1)] for each in (scaled(rank, world[1], device)
                                                                        for rank in range(world[1]))]
            block = torch.cat(sent)
            to.append(torch.nn.functional.pad(block, (0, 0, 0, -len(block) % ALIGNMENT)))
    assert counts.tolist() == [len(block) for block in wanted[0]]
    for each, want in ((rows, torch.cat(wanted[0])), (row_scales, torch.cat(wanted[1]))):
        assert torch.equal(each[:len(want)], want)


def test_overflow(bootstrapped, world, device):
    """Rows beyond the capacity are dropped; the total counts them."""
    buffer, ep = bootstrapped(2 * ALIGNMENT, drop_on_overflow=True)
    ids = torch.zeros((MOST, TOP_K), dtype=torch.int64, device=device) + torch.arange(TOP_K, device=device)
    tokens = torch.ones((MOST, HIDDEN), dtype=torch.bfloat16, device=device)
    rows, _, _ = ep.ep_dispatch(buffer, tokens, ids, torch.ones(ids.shape, device=device))
    each = -(-MOST * world[1] // ALIGNMENT) * ALIGNMENT
    assert int(buffer.total_recv_tokens) == (TOP_K * each if world[0] == 0 else 0)
    assert len(rows) == 2 * ALIGNMENT
