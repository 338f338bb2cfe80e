"""Tensors that operations use are kept alive: in flight, on other streams, in CUDA graphs."""

import ctypes
import gc
import weakref

import pytest
import torch

from nccl_ep.operators import numbers
from nccl_ep.runtime import Runtime
from problems import captured

HIDDEN = 4096


def test_what_a_staged_operation_writes_to_is_kept(small, device, algorithm):
    """Though the caller drops it: the receive phase would write into reused memory. High throughput ignores send_only,
    so that nothing is kept for a `complete` that never comes."""
    _, handle = small(1, algorithm)
    result = weakref.ref(handle.dispatch(torch.ones((1, 8), device=device), send_only=True).tokens)
    gc.collect()
    assert (result() is None) == (algorithm == "ht")
    handle.complete()
    gc.collect()
    assert result() is None


def test_a_refused_handle_leaves_nothing(small, device):
    ep, _ = small(1)
    known = len(numbers._LIVE)
    for wrong in (torch.zeros(3, device=device), torch.zeros((30, 1), dtype=torch.int64, device=device)):
        with pytest.raises((ValueError, RuntimeError)):
            ep.create_handle(wrong)
    gc.collect()
    assert len(numbers._LIVE) == known


@pytest.mark.parametrize("algorithm, staged", [
    ("ll", False), ("ll", True), pytest.param("ht", False, marks=pytest.mark.high_throughput)])
def test_operations_on_another_stream(group, size, device, algorithm, staged):
    """The operation waits for the current stream and keeps its tensors after the caller drops them.
    """
    hidden, on_gpu = HIDDEN, device.type == "cuda"
    ep = group(num_experts=size, hidden=hidden, max_tokens_per_rank=8, dtype=torch.float32,
               algorithm=algorithm)
    low_latency = algorithm == "ll"
    stream = torch.cuda.Stream(device) if on_gpu else None
    for _ in range(4):
        if on_gpu:
            torch.cuda._sleep(2_000_000)
        ids = torch.arange(8, device=device).reshape(8, 1) % size
        weights = torch.full((8, 1), 2.0, device=device)
        tokens = torch.ones((8, hidden), device=device) * torch.arange(8.0, device=device)[:, None]
        handle = ep.create_handle(ids, stream=stream)
        received = handle.dispatch(tokens, None if low_latency else weights, send_only=staged,
                                   stream=stream)
        handle.complete(stream=stream)
        output = handle.combine(received.tokens, weights if low_latency else None,
                                send_only=staged, stream=stream)
        handle.complete(stream=stream)
        del ids, weights, tokens, handle, received
        # This may reuse the memory of dropped tensors, unless they are kept.
        rubbish = [torch.full((8, hidden), 9.0, device=device) for _ in range(8)]
        if on_gpu:
            torch.cuda.current_stream(device).wait_stream(stream)
        want = torch.arange(8.0, device=device)[:, None].expand(8, hidden)
        assert torch.equal(output, want * 2 if low_latency else want)
        del rubbish


def test_complete_on_another_current_stream(on_gpu, group, size, device):
    """`complete` writes to tensors of the first stream, whose memory must not be reused meanwhile.
    """
    ep = group(num_experts=size, hidden=HIDDEN, max_tokens_per_rank=8, dtype=torch.float32)
    other = torch.cuda.Stream(device)
    handle = ep.create_handle(torch.arange(8, device=device).reshape(8, 1) % size)
    received = handle.dispatch(torch.ones((8, HIDDEN), device=device), send_only=True)
    with torch.cuda.stream(other):
        torch.cuda._sleep(20_000_000)
        handle.complete()
    shape = received.tokens.shape
    del received, handle
    rubbish = torch.full(shape, 9.0, device=device)
    torch.cuda.synchronize()
    assert bool((rubbish == 9.0).all())


@pytest.mark.high_throughput
def test_dispatch_waits_for_the_handles_own_copy_of_ids(on_gpu, group, size, device, monkeypatch):
    """It is made after the exchange, so what waits for the group's last operation does not wait for it."""
    ep = group(num_experts=size, hidden=HIDDEN, max_tokens_per_rank=8, dtype=torch.float32, algorithm="ht")
    ids = torch.arange(8, device=device).reshape(8, 1) % size
    tokens, weights = torch.ones((8, HIDDEN), device=device), torch.full((8, 1), 2.0, device=device)
    first, second = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def clone(tensor):
        made = torch.full_like(tensor, -1)
        torch.cuda._sleep(20_000_000)
        return made.copy_(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", clone)
        handle = ep.create_handle(ids, stream=first)
    received = handle.dispatch(tokens, weights, stream=second)
    torch.cuda.synchronize()
    assert int((received.topk_weights[:handle.num_recv_tokens] == 2.0).sum()) == 8


@pytest.fixture
def addresses(device, cudart) -> list[int]:
    """Of two streams."""
    if device.type == "cuda":
        streams = [torch.cuda.Stream(device) for _ in range(2)]
        yield [stream.cuda_stream for stream in streams]
        return
    made = [ctypes.c_void_p(), ctypes.c_void_p()]
    for stream in made:
        assert cudart["cudaStreamCreate"](ctypes.byref(stream)) == 0
    yield [stream.value for stream in made]
    for stream in made:
        cudart["cudaStreamDestroy"](stream)


def test_the_handles_own_copy_of_ids(group, size, device, cudart, addresses, monkeypatch,
                                     algorithm):
    """It is kept for each stream that reads it, once, as nobody else knows of it."""
    ep = group(num_experts=size, hidden=8, max_tokens_per_rank=1, dtype=torch.float32,
               algorithm=algorithm)
    ids = torch.zeros((1, 1), dtype=torch.int32, device=device)
    tokens = torch.ones((1, 8), device=device)
    current, kept = addresses[0], []
    monkeypatch.setattr(Runtime, "stream", lambda *_: current)
    monkeypatch.setattr(Runtime, "keep_for", lambda self, stream, tensors: kept.extend(
        (current, tensor.data_ptr()) for tensor in tensors))
    with ep.create_handle(ids) as handle:
        for current in (addresses[0], addresses[0], addresses[1], addresses[1]):
            handle.dispatch(tokens)
            cudart["cudaDeviceSynchronize"]()
        assert kept == [(addresses[1], handle.topk_idx.data_ptr())]


@pytest.mark.high_throughput
def test_high_throughput_reads_ids_once(opened):
    """A program may reuse its memory: weights are found by the ids that the handle was made with."""
    problem, ep, _ = opened("ht")
    ids = problem.topk_idx.clone()
    handle = ep.create_handle(ids)
    want = handle.dispatch(problem.tokens, problem.weights)
    ids.copy_(ids.flip(1))
    again = handle.dispatch(problem.tokens, problem.weights)
    assert all(torch.equal(*pair) for pair in zip(want[2:4], again[2:4]))
    with_gradients = problem.weights.clone().requires_grad_()
    received = handle.dispatch(problem.tokens, with_gradients)
    ids.zero_()
    received.topk_weights.sum().backward()
    assert torch.equal(with_gradients.grad, torch.ones_like(problem.weights))


def test_a_captured_handle_lives_as_long_as_its_group(group, size, device, monkeypatch):
    """On any device: a handle that the package considers captured is kept."""
    ep = group(num_experts=size, hidden=8, max_tokens_per_rank=1, dtype=torch.float32)
    alive = []
    for captured in (False, True):
        monkeypatch.setattr(Runtime, "is_capturing", lambda *_, captured=captured: captured)
        handle = ep.create_handle(torch.zeros((1, 1), dtype=torch.int64, device=device))
        handle.dispatch(torch.ones((1, 8), device=device))
        alive.append(weakref.ref(handle))
        del handle
        gc.collect()
    assert alive[0]() is None and alive[1]() is not None
    ep.close()
    gc.collect()
    assert alive[1]() is None


def test_a_cuda_graph_of_a_handle_that_nobody_has(on_gpu, opened, size, algorithm):
    """Replays with other tokens, after the program has dropped the handle and the ids."""
    problem, ep, _ = opened(algorithm, bound=9 + 2 * size, hidden=64)
    low_latency = algorithm == "ll"

    def round_trip(handle):
        received = handle.dispatch(problem.tokens, None if low_latency else problem.weights)
        return handle.combine(received.tokens, problem.weights if low_latency else None)

    def of_a_handle():
        handle = ep.create_handle(problem.topk_idx.to(torch.int32))
        return captured(lambda: round_trip(handle))

    graph, output = of_a_handle()
    gc.collect()
    rubbish = [torch.full_like(problem.topk_idx, -1) for _ in range(64)]
    factors = problem.factors if low_latency else problem.ranks
    for step in range(3):
        problem.tokens.add_(step)
        graph.replay()
        problem.close(output, problem.tokens * factors)
    del rubbish
