"""Handles of `open_handle`: routings by `update`, rows by expert, gradients; captured in CUDA graphs."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import BaseTorchDispatchMode

from nccl_ep import NcclEpError, deep_ep
from nccl_ep.runtime import Runtime
from problems import Problem, captured

pytestmark = pytest.mark.high_throughput
_MOST = 24


@pytest.fixture
def ep(group, problem):
    return group(num_experts=problem.num_experts, hidden=problem.hidden, algorithm="ht", max_tokens_per_rank=_MOST)


def test_an_update_is_another_routing(group, size, world, device, algorithm):
    """The same as a handle made of these ids, in any integers; gradients of weights by k."""
    group = group(num_experts=3 * size, hidden=16, algorithm=algorithm, max_tokens_per_rank=_MOST, dtype=torch.float32)
    handle, weights = group.open_handle(), torch.empty((9, 2), device=device)
    for call in (lambda: handle.dispatch(torch.empty((0, 16), device=device)),
                 lambda: handle.dispatch(torch.empty((9, 16), device=device)),
                 lambda: handle.combine(torch.empty((9, 16), device=device), None if algorithm == "ht" else weights)):
        with pytest.raises(NcclEpError, match="handle: has no routing yet"):
            call()
    for seed in (1, 2):
        problem = Problem(*world, masked=True, device=device, seed=seed)
        counts = torch.empty(3, dtype=torch.int32, device=device) if algorithm == "ht" else None
        handle.update(problem.topk_idx.to(torch.int32), counts=counts)
        other = group.create_handle(problem.topk_idx)
        weights = problem.weights if algorithm == "ht" else None
        have, want = (each.dispatch(problem.tokens, weights) for each in (handle, other))
        if algorithm == "ll":
            assert torch.equal(have.counts, want.counts)
            assert torch.equal(handle.combine(have.tokens, problem.weights),
                               other.combine(want.tokens, problem.weights))
            continue
        assert all(map(torch.equal, have[2:4], want[2:4])) and torch.equal(have.tokens, want.tokens)
        assert counts.tolist() == [(want.topk_idx == each).sum().item() for each in range(3)]
        _, home = handle.combine_with_weights(have.tokens, have.topk_weights)
        torch.testing.assert_close(home, problem.live_weights)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, BaseTorchDispatchMode])
def test_a_backward_of_an_earlier_routing_is_refused(ep, problem, mode):
    with torch.inference_mode():  # which the mode's operators save nothing of
        handle = ep.open_handle()
    handle.update(problem.topk_idx)
    with mode():
        rows = handle.dispatch(problem.tokens.requires_grad_()).tokens
    handle.update(problem.topk_idx)
    with pytest.raises(RuntimeError, match="update: the handle has another routing than at the operation"):
        rows.sum().backward()


@pytest.mark.parametrize("alignment", [1, 8])
def test_rows_by_expert(ep, problem, alignment):
    """With weights and without, with scales; sums of a token's rows; what a group without room refuses."""
    handle = ep.open_handle(expert_alignment=alignment)
    counts = torch.empty(ep.num_local_experts, dtype=torch.int32, device=ep.device)
    handle.update(problem.topk_idx, counts=counts)
    rows, _, ids, weights, _ = handle.dispatch(problem.tokens, problem.weights)
    found = problem.by_expert()
    assert ids is None and counts.tolist() == [len(each) for each in found]
    assert len(rows) == len(weights) == handle.num_recv_tokens and handle.num_recv_tokens % alignment == 0
    begin = 0
    for pairs in found:
        for at, (token, weight) in enumerate(pairs, begin):
            assert torch.equal(rows[at], token) and weights[at].item() == pytest.approx(weight)
        end = begin + -(-len(pairs) // alignment) * alignment
        assert not rows[begin + len(pairs):end].any() and not weights[begin + len(pairs):end].any()
        begin = end
    assert not weights[begin:].any()
    used = rows[:begin]
    assert torch.equal(handle.dispatch(problem.tokens).tokens[:begin], used)
    scales = torch.ones((len(problem.tokens), 2), device=ep.device)
    scaled = handle.dispatch(problem.tokens.to(torch.float8_e4m3fn), scales=scales, scales_order="column")
    assert scaled.scales.shape == (len(rows), 2) and bool((scaled.scales[:begin][used.any(dim=1)] == 1).all())
    with pytest.raises(NcclEpError, match="rows that lie by expert are not cast"):
        handle.dispatch(problem.tokens, cast="fp8")
    problem.close(handle.combine(used), problem.tokens.float() * problem.experts)
    with pytest.raises(NcclEpError, match="expert_alignment: must be 0 or a power of two"):
        ep.open_handle(expert_alignment=3)
    with pytest.raises(NcclEpError, match="expert_alignment: rows by expert, filled up to it, must be countable"):
        ep.open_handle(expert_alignment=1 << 31)


def test_gradients_by_expert(opened, device):
    """Against the dense computation, with experts on their zones."""
    problem, group, _ = opened("ht", bound=_MOST, masked=True)
    handle = group.open_handle(expert_alignment=4)
    counts = torch.empty(group.num_local_experts, dtype=torch.int32, device=device)
    handle.update(problem.topk_idx, counts=counts)
    tokens, weights = problem.tokens.requires_grad_(), problem.weights.requires_grad_()
    received = handle.dispatch(tokens, weights)
    experts = problem.local_experts(group.num_local_experts)
    results, begin = torch.zeros_like(received.tokens), 0
    for expert, count in zip(experts, counts.tolist()):
        zone = slice(begin, begin + count)
        results[zone] = problem.expert(expert, received.tokens[zone]) * received.topk_weights[zone, None]
        begin += -(-count // 4) * 4
    output = handle.combine(results)
    problem.backward(output)
    problem.check(output)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, BaseTorchDispatchMode])
@pytest.mark.parametrize("recorded", [False, True])
def test_gradients_of_the_experts_by_expert(ep, problem, poisoned, mode, recorded):
    """Whatever is in new memory, as they read the rows behind all experts; also where tokens want none."""
    handle = ep.open_handle(expert_alignment=8)
    handle.update(problem.topk_idx)
    matrix = torch.eye(problem.hidden, dtype=torch.bfloat16, device=ep.device, requires_grad=True)
    tokens, scales = problem.tokens.clone().requires_grad_(recorded), problem.tokens[:, :2].float()
    with mode():
        received = handle.dispatch(tokens, problem.weights)
        scaled = handle.dispatch(problem.tokens.to(torch.float8_e4m3fn), scales=scales, scales_order="column")
        output = handle.combine((received.tokens @ matrix) * received.topk_weights[:, None].to(torch.bfloat16))
        output.sum().backward()
    want = received.tokens.detach().float().t() @ received.topk_weights[:, None].expand_as(received.tokens)
    torch.testing.assert_close(matrix.grad.float(), want, rtol=5e-2, atol=5e-2)
    assert scaled.tokens.float().isfinite().all() and scaled.scales.isfinite().all()


@pytest.mark.parametrize("mode", [contextlib.nullcontext, BaseTorchDispatchMode])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_bound_of_rows(ep, group, problem, mode, recorded):
    """Rows by expert, as many as the bound, also of operators and where gradients are recorded."""
    with ep.open_handle(expert_alignment=1) as whole, ep.open_handle(max_rows=6) as bounded:
        for handle in (whole, bounded):
            handle.update(problem.topk_idx)
        want = whole.dispatch(problem.tokens, problem.weights)
        with mode(), torch.set_grad_enabled(recorded):
            received = bounded.dispatch(problem.tokens, problem.weights)
        came = min(6, int((want.topk_weights != 0).sum()))
        assert received.tokens.shape == (6, problem.hidden) and received.topk_weights.shape == (6,)
        assert torch.equal(received.tokens[:came], want.tokens[:came])
        assert torch.equal(received.topk_weights, want.topk_weights[:6])
        assert bounded.num_recv_tokens == 6
    small = group(num_experts=problem.num_experts, hidden=problem.hidden, max_tokens_per_rank=_MOST)
    with pytest.raises(ValueError, match="^max_rows: needs high throughput"):
        small.open_handle(max_rows=6)


def test_numbers_that_nobody_knows_in_a_graph(group, world, problem, monkeypatch, device):
    """Of a group without a bound; with `out` nobody is asked."""
    group = group(num_experts=problem.num_experts, hidden=problem.hidden, algorithm="ht")
    with pytest.raises(NcclEpError, match="expert_alignment: must be 0 but in high throughput with few enough"):
        group.open_handle(expert_alignment=2)
    handle = group.open_handle()
    handle.update(problem.topk_idx)
    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "is_capturing", lambda *_: True)
        with pytest.raises(RuntimeError, match="num_recv_tokens: a CUDA graph is captured"):
            handle.dispatch(problem.tokens)
        out = problem.tokens.new_empty((_MOST * world[1], problem.hidden))
        rows = handle.dispatch(problem.tokens, out=out).tokens
        other = torch.cuda.Stream() if device.type == "cuda" else "another"
        patch.setattr(Runtime, "is_capturing", lambda _, stream: stream == other)
        with pytest.raises(RuntimeError, match="num_recv_tokens: a CUDA graph is captured"):
            handle.dispatch(problem.tokens, stream=other)
    assert torch.equal(rows[:handle.num_recv_tokens], handle.dispatch(problem.tokens).tokens)


def replayed(problem, others, play):
    """The results of a graph of `play` with other tensors in the problem's memory, and those without a graph."""
    graph, results = captured(play)
    for given in others:
        for mine, its in zip((problem.tokens, problem.topk_idx, problem.weights), given):
            mine.copy_(its)
        graph.replay()
        torch.cuda.synchronize()
        yield [each.clone() for each in results], play()


@pytest.mark.parametrize("how", ["flat", "by expert", "ElasticBuffer", "ElasticBuffer expanded", "Buffer",
                                 "Buffer, low latency", "layer, low latency"])
def test_routings_in_a_graph(captures, ep, layer, problem, world, device, how):
    """Each replay routes by the ids that are there then."""
    tokens, ids, weights = problem.tokens, problem.topk_idx, problem.weights
    buffer = None

    def by_handle():
        handle = ep.open_handle(expert_alignment=8 if how == "by expert" else 0)
        handle.update(ids)
        received = handle.dispatch(tokens, weights)
        return handle.combine(received.tokens), received.topk_weights

    def elastic():
        rows, _, factors, handle, _ = buffer.dispatch(
            tokens, ids, weights, num_experts=problem.num_experts, num_max_tokens_per_rank=_MOST, do_cpu_sync=False,
            do_expand=how.endswith("expanded"), do_zero_padding=True, expert_alignment=8)
        sums, home, _ = buffer.combine(rows, handle, factors)
        return sums, home, handle.psum_num_recv_tokens_per_expert

    def first_version():
        layout = buffer.get_dispatch_layout(ids, problem.num_experts)
        rows, _, factors, _, handle, _ = buffer.dispatch(
            tokens, topk_idx=ids, topk_weights=weights, num_tokens_per_expert=layout[2],
            num_worst_tokens=_MOST * world[1])
        return buffer.combine(rows, handle, factors)[:2]

    def low_latency():
        rows, _, handle, _, _ = buffer.low_latency_dispatch(tokens, ids, _MOST, problem.num_experts, use_fp8=False)
        return buffer.low_latency_combine(rows, ids, weights, handle)[:1]

    @torch.no_grad()
    def layered():
        rows, _, layout = small.dispatch(tokens, ids, weights)
        return [small.combine(rows, layout)]

    play = {"Buffer": first_version, "Buffer, low latency": low_latency, "layer, low latency": layered}.get(
        how, elastic if "Buffer" in how else by_handle)
    if "Buffer" in how:
        kind = deep_ep.ElasticBuffer if "Elastic" in how else deep_ep.Buffer
        buffer = kind(dist.group.WORLD, explicitly_destroy=True)
    elif play == layered:
        small = layer(problem, latency_tokens=_MOST)
    other = Problem(*world, hidden=problem.hidden, dtype=torch.bfloat16, masked=True, device=device, seed=8)
    same = [each.clone() for each in (tokens, ids, weights)]
    others = (other.tokens, other.topk_idx, other.weights)
    for have, want in replayed(problem, (others, same, others), play):
        assert all(map(torch.equal, have, want))
    if buffer is not None:
        buffer.destroy()
