"""`EPAll2AllLayer` with `latency_tokens`: small batches by low latency, in the layer's own words."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist

from nccl_ep.handle_pool import Slot
from nccl_ep.layers import latency
from problems import Problem, without_waiting

pytestmark = pytest.mark.high_throughput


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def run(layer, problem, **how):
    """Experts by torch on whatever rows a dispatch has; the sums, and tokens of each expert."""
    rows, weights, layout = layer.dispatch(problem.tokens, problem.topk_idx, problem.weights, **how)
    matrices = problem.local_experts(layer.num_experts_per_rank)
    values = rows.float()
    if layout.scales is not None:
        values = values * layout.scales.float().reshape(len(rows), -1)
    blocks = values.split(layout.num_recv_tokens_per_expert_list)
    results = torch.cat([problem.expert(*pair) for pair in zip(matrices, blocks)])
    return layer.combine(results * weights[:, None], layout), layout


@pytest.mark.parametrize("masked, repeated", [(False, False), (True, False), (True, True)])
def test_both_modes_have_the_same_sums(layer, layered, world, masked, repeated):
    most = 9 + 2 * world[1]
    problem, ep = layered(latency_tokens=most, masked=masked, repeated=repeated)
    assert ep.latency_rows == most * world[1] * ep.num_experts_per_rank
    (small, of_small), (large, of_large) = run(ep, problem), run(layer(problem), problem)
    problem.close(small, problem.dense().output)
    problem.close(small, large)
    assert of_small.num_dispatch_token_cur_rank == ep.latency_rows
    if not repeated:
        assert torch.equal(of_small.num_recv_tokens_per_expert, of_large.num_recv_tokens_per_expert)


def test_batches_of_the_full_size_and_without_weights(layered, world):
    most = 6 + 2 * (world[1] - 1)
    problem, ep = layered(latency_tokens=most, tokens=6)
    problem.close(run(ep, problem)[0], problem.dense().output)
    rows, weights, layout = ep.dispatch(problem.tokens, problem.topk_idx)
    assert weights is None
    problem.close(ep.combine(rows, layout), problem.tokens * problem.experts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_of_weights(layer, world, device, dtype):
    """Of odd numbers of ids and rows; each dispatch has weights of its own."""
    problem = Problem(*world, device=device, tokens=1, experts_per_rank=3, top_k=1)
    ep = layer(problem, latency_tokens=2 * world[1] - 1, weight_dtype=dtype)
    for _ in range(2):
        rows, weights, layout = ep.dispatch(problem.tokens, problem.topk_idx, problem.weights)
        assert torch.equal(weights, torch.ones(ep.latency_rows, dtype=dtype, device=device))
        problem.close(ep.combine(rows * weights.mul_(2)[:, None], layout), 2 * problem.tokens * problem.factors)


@pytest.mark.parametrize("order", ["row", "column"])
def test_scales(layered, world, order):
    problem, ep = layered(latency_tokens=9 + 2 * world[1], hidden=64)
    with torch.no_grad():
        rows, _, layout = ep.dispatch(problem.tokens, problem.topk_idx, problem.weights, cast="fp8",
                                      scales_order=order)
        scales = layout.scales if order == "row" else layout.scales.flatten(0, 1)
        assert rows.dtype == torch.float8_e4m3fn and scales.shape == (len(rows), 1)
        sums = ep.combine(rows.float() * scales, layout)
    torch.testing.assert_close(sums, problem.tokens * problem.factors, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("small", [False, True])
def test_what_is_large_or_has_gradients_goes_by_high_throughput(layered, world, device, small):
    """Also if those of the experts' parameters are the only ones."""
    problem, ep = layered(latency_tokens=9 + 2 * world[1] if small else 4)
    factor = torch.ones(problem.hidden, device=device, requires_grad=True)
    with torch.set_grad_enabled(small):
        rows, weights, layout = ep.dispatch(problem.tokens, problem.topk_idx, problem.weights)
        assert layout.exchange is None and len(rows) == sum(layout.num_recv_tokens_per_expert_list)
        sums = ep.combine(rows * factor * weights[:, None], layout)
        if small:
            sums.sum().backward()
    assert (factor.grad is not None) == small


def test_batches_in_flight(layered, world):
    """Any number at a time, with ids and weights of their own; the text says that a later one has taken a place."""
    problem, ep = layered(latency_tokens=9 + 2 * world[1])
    made = []
    for scale in range(1, 6):
        ids, factors = problem.topk_idx.clone(), problem.weights.clone()
        made.append((problem.tokens * scale, *ep.dispatch(problem.tokens * scale, ids, factors)))
        ids.fill_(-1)
        factors.fill_(0)
    for tokens, rows, weights, layout in made:
        assert torch.equal(layout.topk_indices_tensor, problem.topk_idx.int())
        problem.close(ep.combine(rows * weights[:, None], layout), tokens * problem.factors)
    later = [ep.dispatch(problem.tokens, problem.topk_idx, problem.weights) for _ in range(8)]
    for _, rows, _, layout in made:
        with pytest.raises(RuntimeError, match="layout_desc: it has been combined, and another dispatch has its"):
            ep.combine(rows, layout)
    for rows, _, layout in later:
        problem.close(ep.combine(rows, layout), problem.tokens * problem.factors)
    with pytest.raises(TypeError, match="^Slot: belongs to the process"):
        copy.deepcopy(layout)
    with pytest.raises(TypeError, match="input: must be a tensor, not list"):
        ep.dispatch([[1.0]], problem.topk_idx)
    with pytest.raises(ValueError, match="layout_desc: .*it has no rows of pairs"):
        _ = layout.token_dst_scatter_idx
    dist.barrier()


def test_operations_follow_each_other(layer, world, device, monkeypatch):
    """An earlier operation may be queued on another stream, and a dispatch over nodes writes ids first."""
    problem = Problem(*world, device=device)
    calls = []

    class Noted(contextlib.AbstractContextManager):
        def __init__(self, device): ...

        def __enter__(self):
            calls.append("follows")

        def __exit__(self, *error):
            calls.append("ends")

    monkeypatch.setattr(latency, "Use", Noted)
    monkeypatch.setattr(Slot, "route", lambda place, ids, route=Slot.route: calls.append("ids") or route(place, ids))
    ep = layer(problem, latency_tokens=9 + 2 * world[1])
    rows, weights, layout = ep.dispatch(problem.tokens, problem.topk_idx, problem.weights)
    ep.combine(rows, layout)
    assert calls == ["follows", "ids", "ends", "follows", "ends"]


def test_memory_is_kept_for_the_stream_that_uses_it(layered, world, monkeypatch):
    """Weights, and the ids beside them, are of the dispatch's stream."""
    problem, ep = layered(latency_tokens=9 + 2 * world[1])
    noted = []
    monkeypatch.setattr(latency, "kept", lambda each: noted.append(each) or each)
    rows, _, layout = ep.dispatch(problem.tokens, problem.topk_idx, problem.weights)
    assert not noted
    ep.combine(rows, layout)
    assert [each.data_ptr() for each in noted] == [layout.exchange.weights.data_ptr()]
    memory = layout.exchange.weights.untyped_storage().data_ptr()
    assert layout.exchange.ids.untyped_storage().data_ptr() == memory


def test_the_host_does_not_wait(layered, world, device):
    problem, ep = layered(latency_tokens=9 + 2 * world[1])
    rows, weights, layout = ep.dispatch(problem.tokens, problem.topk_idx, problem.weights)
    with without_waiting(device):
        rows, weights, layout = ep.dispatch(problem.tokens, problem.topk_idx, problem.weights)
        ep.combine(rows * weights[:, None], layout)


@pytest.mark.parametrize("value", [-1, 1.5])
def test_wrong_numbers(layer, world, value):
    with pytest.raises((TypeError, ValueError), match="latency_tokens: must be"):
        layer(Problem(*world), latency_tokens=value)
