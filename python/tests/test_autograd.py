"""HT dispatch and combine, forward and backward, against dense torch on the tokens of all ranks."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from nccl_ep import EpGroup, NcclEpError
from nccl_ep.autograd import ht_combine, ht_dispatch

pytestmark = pytest.mark.high_throughput


@pytest.fixture
def routed(opened):
    """Tokens and weights that need gradients, some ids masked, and a handle for them."""
    problem, _, handle = opened("ht", masked=True)
    problem.tokens.requires_grad_()
    problem.weights.requires_grad_()
    return problem, handle


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked, repeated", [(False, False), (True, False), (True, True)])
def test_moe_layer_matches_dense_torch(opened, dtype, masked, repeated):
    """Also where tokens name an expert twice: its weight is the sum, in both directions."""
    problem, ep, handle = opened("ht", dtype=dtype, masked=masked, repeated=repeated)
    tokens, weights = problem.tokens.requires_grad_(), problem.weights.requires_grad_()
    experts = problem.local_experts(ep.num_local_experts).requires_grad_()
    received, ids, factors = ht_dispatch(handle, tokens, weights)
    combined = ht_combine(handle, problem.mixed(received, ids, factors, experts).to(dtype))
    problem.backward(combined)
    problem.check(combined, experts)


def test_ranks_whose_results_nobody_used_take_part(group, rank, size, device):
    """The gradient of rank 0's tokens comes from all ranks, even if those use only the weights."""
    ep = group(num_experts=size, hidden=8, algorithm="ht", dtype=torch.float32)
    handle = ep.create_handle(torch.arange(size, device=device).reshape(1, size))
    tokens = torch.ones((1, 8), device=device, requires_grad=True)
    weights = torch.arange(1.0, size + 1, device=device).reshape(1, size).requires_grad_()
    received, _, factors = ht_dispatch(handle, tokens, weights)
    loss = factors.sum() if rank != 0 else received.sum()
    loss.backward()
    assert torch.equal(tokens.grad, torch.ones_like(tokens))
    want = torch.tensor([[0.0] + [1.0] * (size - 1)], device=device)
    assert torch.equal(weights.grad, want)


def test_a_handle_serves_several_exchanges(routed):
    """Two layers over one routing, the second on the first one's results; gradients of both."""
    problem, handle = routed
    tokens, weights = problem.tokens, problem.weights
    values = tokens
    for power in (1, 2):
        received, _, factors = ht_dispatch(handle, values, weights)
        values = ht_combine(handle, received * (factors ** power).sum(dim=1, keepdim=True))
    want = tokens * problem.factors * problem.live_weights.square().sum(1, keepdim=True)
    problem.same(values, want)


def test_what_is_no_tensor_is_refused(routed):
    problem, handle = routed
    for call, name in ((lambda: ht_dispatch(handle, None, problem.weights), "tokens"),
                       (lambda: ht_dispatch(handle, problem.tokens, [1.0]), "topk_weights"),
                       (lambda: ht_combine(handle, None), "tokens")):
        with pytest.raises(TypeError, match=f"{name}: must be a tensor"):
            call()


def test_a_graph_that_is_kept_and_none_at_all(routed):
    """Backward twice over one graph; then the same without gradients."""
    problem, handle = routed
    tokens, weights = problem.tokens, problem.weights

    def forward():
        received, _, factors = ht_dispatch(handle, tokens, weights)
        return ht_combine(handle, received * factors.sum(dim=1, keepdim=True))

    output = forward()
    problem.backward(output, retain_graph=True)
    once = tokens.grad.clone(), weights.grad.clone()
    problem.backward(output)
    assert torch.equal(tokens.grad, 2 * once[0]) and torch.equal(weights.grad, 2 * once[1])
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            again = forward()
        assert torch.equal(again, output) and not again.requires_grad


def test_a_handle_of_inference_mode(group, size, device):
    """Its copy of the ids has no versions, and backward needs none."""
    ep = group(num_experts=size, hidden=16, algorithm="ht", dtype=torch.float32)
    weights = torch.ones((3, 1), device=device, requires_grad=True)
    with torch.inference_mode():
        handles = [ep.create_handle(torch.zeros((3, 1), dtype=dtype, device=device))
                   for dtype in (torch.int64, torch.int32)]
    for handle in handles:
        weights.grad = None
        received = handle.dispatch(torch.ones((3, 16), device=device), weights)
        received.topk_weights.sum().backward()
        assert torch.equal(weights.grad, torch.ones_like(weights))


def test_gradients_that_would_be_dropped_are_refused(routed, device):
    """They are not lost silently; without gradients the same calls pass."""
    problem, handle = routed
    rows = handle.num_recv_tokens
    received = torch.zeros((rows, problem.hidden), device=device, requires_grad=True)
    weights = torch.zeros((rows, problem.top_k), device=device)
    out = torch.empty((rows, problem.hidden), device=device)
    calls = [(lambda: handle.dispatch(problem.tokens, out=out), "dispatch: .*with out"),
             (lambda: handle.combine(received, out=torch.empty_like(problem.tokens)),
              "combine: .*with out"),
             (lambda: handle.combine_with_weights(received, weights),
              "combine_with_weights: .*it has no gradient; call it under torch.no_grad")]
    for call, text in calls:
        with pytest.raises(RuntimeError, match=text):
            call()
        with torch.no_grad():
            call()


@pytest.mark.parametrize("lost", ["combine", "dispatch"])
def test_a_backward_that_a_rank_leaves_out(rank, size, device, monkeypatch, lost):
    """The text of those that wait for it says what they did last, and in which group."""
    if size == 1:
        pytest.skip("no other rank")
    monkeypatch.setenv("NCCL_EP_TIMEOUT_MS", "1500")
    group = EpGroup(size, 16, algorithm="ht", dtype=torch.float32)
    group.label = "layer 7"
    handle = group.create_handle(torch.arange(size, device=device).reshape(1, size))
    tokens = torch.ones((1, 16), device=device, requires_grad=True)
    received = handle.dispatch(tokens)
    output = handle.combine(received.tokens)
    dist.barrier()
    if rank != 1:
        with pytest.raises(NcclEpError) as caught:
            (received.tokens if lost == "dispatch" else output).sum().backward()
            for _ in range(400):
                group.check()
                time.sleep(0.05)
        text = "backward of dispatch" if lost == "dispatch" else "backward of combine"
        assert f"; last calls of this rank in layer 7: dispatch, combine, {text}" in str(caught.value)
    dist.barrier()
    monkeypatch.undo()
    with contextlib.suppress(NcclEpError):
        group.close()


def test_low_latency_has_no_gradients(small, device):
    _, handle = small(1)
    tokens = torch.ones((1, 8), device=device, requires_grad=True)
    weights = torch.ones((1, 1), device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="dispatch: .*but low latency has no gradients"):
        handle.dispatch(tokens)
    received = handle.dispatch(tokens.detach()).tokens
    with pytest.raises(RuntimeError, match="combine: .*but low latency has no gradients"):
        handle.combine(received, weights)
    with torch.no_grad():
        assert torch.equal(handle.combine(received, weights), tokens)
    for call in (lambda: ht_dispatch(handle, tokens, weights), lambda: ht_combine(handle, tokens)):
        with pytest.raises(ValueError, match="handle: low latency has no gradients"):
            call()


def test_transforms_of_torch_func(opened):
    """The gradients of autograd, also of gradients; operations of a batch one after the other."""
    problem, ep, handle = opened("ht", masked=True)
    tokens, weights = problem.tokens, problem.weights

    def loss(tokens, weights):
        received = handle.dispatch(tokens, weights)
        rows = received.tokens.square() * received.topk_weights.sum(dim=1, keepdim=True)
        return handle.combine(rows).sum()

    def by_autograd(function, *arguments):
        arguments = [each.clone().requires_grad_() for each in arguments]
        return torch.autograd.grad(function(*arguments), arguments, create_graph=True)

    def curvature(gradient):
        return lambda tokens: sum(each.square().sum() for each in gradient(tokens))

    for have, want in zip(torch.func.grad(loss, argnums=(0, 1))(tokens, weights), by_autograd(loss, tokens, weights)):
        assert torch.equal(have, want)
    [want] = by_autograd(curvature(lambda tokens: by_autograd(loss, tokens, weights)[:1]), tokens)
    have = torch.func.grad(curvature(lambda tokens: [torch.func.grad(loss)(tokens, weights)]))(tokens)
    torch.testing.assert_close(have, want)

    batch = torch.stack([tokens, 2 * tokens])
    have = torch.func.vmap(lambda tokens: handle.combine(handle.dispatch(tokens).tokens))(batch)
    assert torch.equal(have, torch.stack([handle.combine(handle.dispatch(each).tokens) for each in batch]))

    def routed(tokens):
        """Its routing is made of what is transformed."""
        counts = torch.empty(ep.num_local_experts, dtype=torch.int32, device=problem.device)
        inside = ep.create_handle(tokens[:, :problem.num_experts].topk(2).indices, counts=counts)
        assert counts.sum() >= inside.num_recv_tokens
        return inside.combine(inside.dispatch(tokens).tokens.square()).sum()

    assert torch.equal(torch.func.grad(routed)(tokens), by_autograd(routed, tokens)[0])


def test_forward_mode(opened):
    """Tangents of both tensors or of one, of gradients, and of torch's dual tensors."""
    problem, _, handle = opened("ht", masked=True)
    both = problem.tokens, problem.weights
    along = tuple(torch.randn_like(each) for each in both)

    def moe(tokens, weights):
        received = handle.dispatch(tokens, weights)
        return handle.combine(received.tokens.square() * received.topk_weights.sum(dim=1, keepdim=True))

    def dense(tokens, weights):
        return tokens.square() * torch.where(problem.topk_idx >= 0, weights, 0.0).sum(dim=1, keepdim=True)

    def same(make):
        torch.testing.assert_close(make(moe), make(dense), rtol=1e-4, atol=1e-4)

    same(lambda layer: torch.func.jvp(layer, both, along))
    same(lambda layer: torch.func.jvp(lambda weights: layer(both[0], weights), both[1:], along[1:]))
    same(lambda layer: torch.func.jvp(torch.func.grad(lambda tokens: layer(tokens, both[1]).square().sum()), both[:1],
                                      along[:1]))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(both[0], along[0])
        same(lambda layer: forward_ad.unpack_dual(layer(dual, both[1])).tangent)
        rows = dual.new_empty((handle.num_recv_tokens, problem.hidden))
        with pytest.raises(RuntimeError, match="dispatch: its tensors require gradients, but with out"):
            handle.dispatch(dual, out=rows)
        handle.dispatch(both[0], out=rows)
        with torch.inference_mode():
            handle.dispatch(both[0].clone(), out=rows)


def test_what_torch_func_cannot_transform(opened):
    problem, ep, handle = opened("ht")
    ids = torch.stack([problem.topk_idx] * 2)
    for function, text in ((lambda: torch.func.vmap(ep.create_handle)(ids), "topk_idx: a routing is no matter of vmap"),
                           (lambda: torch.func.grad(lambda rows: handle.dispatch(rows, stream=1).tokens.sum())(
                               problem.tokens), "dispatch: torch.func cannot transform it, as with out")):
        with pytest.raises(RuntimeError, match=text):
            function()
    low_problem, _, low = opened("ll")
    with pytest.raises(RuntimeError, match="torch.func cannot transform it, as low latency has no gradients"):
        torch.func.grad(lambda rows: low.dispatch(rows).tokens.sum())(low_problem.tokens)
