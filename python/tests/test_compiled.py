"""`torch.compile(fullgraph=True)` and `torch.export` of programs that dispatch and combine.

Only the step `python/compiled` runs this and test_operators.py, on two ranks: loading the compiler
takes most of the time.
"""

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from nccl_ep import deep_ep
from nccl_ep.autograd import ht_combine, ht_dispatch
from nccl_ep.operators import traced
from problems import Problem

pytestmark = pytest.mark.high_throughput


@pytest.fixture(autouse=True)
def afresh(two_ranks):
    """Nothing that an earlier test has compiled."""
    torch.compiler.reset()


def compiled(function, backend="aot_eager"):
    """Compiles a function without a break of its graph."""
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.fixture
def unknown_sizes():
    """What a program sets that has no bound of tokens: the numbers of rows are unknown."""
    import torch._dynamo.config

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def same(got, want):
    """Two results of one program."""
    for have, expected in zip(got, want, strict=True):
        torch.testing.assert_close(have, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_low_latency(low_latency, backend):
    """Ids that the graph itself changes, with and without stages."""
    problem, handle = low_latency

    def step(tokens, ids, weights, staged):
        handle.topk_idx.copy_(ids)
        received = handle.dispatch(tokens * 2, send_only=staged)
        handle.complete()
        output = handle.combine(received.tokens * 2, weights, send_only=staged)
        handle.complete()
        return output, received.counts

    function = compiled(step, backend)
    for staged in (False, True):
        for ids in (problem.topk_idx.clone(), problem.topk_idx.flip(0).clone()):
            want = step(problem.tokens, ids, problem.weights, staged)
            handle.topk_idx.fill_(-1)
            same(function(problem.tokens, ids, problem.weights, staged), want)
            assert torch.equal(handle.topk_idx, ids)


def test_views(low_latency):
    """They are made between two graphs, and not within one."""
    problem, handle = low_latency

    def step(tokens, weights):
        received = handle.dispatch(tokens * 2, weights, layout="rank", view=True)
        used = torch.arange(32, device=tokens.device) < received.counts[:, None]
        rows = received.tokens * received.topk_weights.sum(dim=2, keepdim=True)
        return handle.combine(torch.where(used[..., None], rows, torch.nan).to(tokens.dtype)) + 1

    arguments = problem.tokens, problem.weights
    want = step(*arguments)
    for whole in (compiled(step), make_fx(step)):
        with pytest.raises(RuntimeError, match="view: not within one graph of a compiler; without fullgraph"):
            whole(*arguments)
    function = torch.compile(step, backend="aot_eager")
    for _ in range(3):
        torch.testing.assert_close(function(*arguments), want)


@pytest.mark.parametrize("staged", [False, True])
def test_scales_of_low_latency(low_latency, staged):
    problem, handle = low_latency

    def step(tokens, weights):
        received = handle.dispatch(tokens, cast="fp8", scales_order="column", send_only=staged)
        handle.complete()
        rows = (received.tokens.float() * received.scales).to(torch.bfloat16)
        return handle.combine(rows, weights), received.counts

    same(compiled(step)(problem.tokens, problem.weights), step(problem.tokens, problem.weights))


def gradients(function, problem, *arguments):
    """The output, and the gradients of tokens and weights."""
    tokens, weights = (each.clone().requires_grad_() for each in (problem.tokens, problem.weights))
    output = function(tokens, weights, *arguments)
    output.backward(problem.grad)
    return output.detach(), tokens.grad, weights.grad


@pytest.mark.parametrize("bound", [32, 0], ids=["bound", "auto"])
def test_high_throughput(opened, bound, unknown_sizes):
    """A handle from outside, one that the graph makes, and the functions of `autograd`."""
    problem, ep, _ = opened("ht", bound=bound, masked=True)

    def outside(tokens, weights, handle):
        received = handle.dispatch(tokens * 2, weights)
        return handle.combine(received.tokens * received.topk_weights.sum(dim=1, keepdim=True))

    def inside(tokens, weights, ids):
        return outside(tokens, weights, ep.create_handle(ids))

    def functions(tokens, weights, ids):
        handle = ep.create_handle(ids)
        rows, _, factors = ht_dispatch(handle, tokens * 2, weights)
        return ht_combine(handle, rows * factors.sum(dim=1, keepdim=True))

    want = gradients(inside, problem, problem.topk_idx)
    function = compiled(functions if bound else inside)
    same(gradients(function, problem, problem.topk_idx), want)
    # A handle for each step, which only the graph holds in backward: one graph serves them all.
    function = compiled(outside)
    for _ in range(3):
        same(gradients(function, problem, ep.create_handle(problem.topk_idx)), want)


def routed_step(handle):
    """A layer of a handle that is opened; the step gives it a routing."""
    def step(tokens, weights, ids):
        handle.update(ids)
        received = handle.dispatch(tokens * 2, weights)
        factors = received.topk_weights if handle.expert_alignment else received.topk_weights.sum(dim=1)
        return handle.combine(received.tokens * factors[:, None])

    return step


@pytest.mark.parametrize("alignment", [0, 4])
def test_updates(opened, alignment):
    """Each run of a graph gives the same handle another routing, of which a second graph makes use."""
    problem, ep, _ = opened("ht", bound=32, masked=True)
    handle = ep.open_handle(expert_alignment=alignment)
    step, again = routed_step(handle), lambda tokens: handle.combine(handle.dispatch(tokens).tokens)
    function, other = compiled(step), compiled(again)
    for ids in (problem.topk_idx, problem.topk_idx.flip(0).contiguous()):
        want = gradients(step, problem, ids), again(problem.tokens)
        handle.update(torch.full_like(ids, -1))
        same(gradients(function, problem, ids), want[0])
        same([other(problem.tokens)], want[1:])


def test_cuda_graph_trees(captures, opened):
    """Inductor takes CUDA graphs of both modes."""
    problem, ep, _ = opened("ht", bound=32)
    step = routed_step(ep.open_handle())
    function = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    from torch._dynamo.utils import counters

    with torch.no_grad():
        for ids in [problem.topk_idx, problem.topk_idx.flip(0).contiguous()] * 3:
            want = step(problem.tokens, problem.weights, ids)
            same([function(problem.tokens, problem.weights, ids)], [want])
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_the_layer(layered, unknown_sizes):
    """In one graph, by both of its modes, and with scales."""
    problem, ep = layered(latency_tokens=16)

    def step(tokens, weights, ids):
        rows, factors, layout = ep.dispatch(tokens, ids, weights)
        return ep.combine(rows.tanh() * factors[:, None], layout)

    def scaled(tokens, weights, ids):
        rows, factors, layout = ep.dispatch(tokens, ids, weights, cast="fp8")
        return ep.combine(rows.float() * layout.scales * factors[:, None], layout)

    same(gradients(compiled(step), problem, problem.topk_idx),
         gradients(step, problem, problem.topk_idx))
    many = [torch.cat([each, each]) for each in (problem.tokens, problem.weights, problem.topk_idx)]
    for function in (step, scaled):
        for arguments in ((problem.tokens, problem.weights, problem.topk_idx), many):
            torch.compiler.reset()
            with torch.no_grad():
                same([compiled(function)(*arguments)], [function(*arguments)])


def test_a_stream_is_refused(low_latency, monkeypatch):
    """Compiled code runs on the current one."""
    problem, handle = low_latency
    monkeypatch.setattr(traced, "_is_compiling", lambda: True)
    for call in (lambda: handle.dispatch(problem.tokens, stream=1), lambda: handle.complete(stream=1),
                 lambda: handle.group.create_handle(problem.topk_idx, stream=1)):
        with pytest.raises(ValueError, match="stream: must be None in code that is traced"):
            call()


@pytest.mark.parametrize("strict", [False, True])
def test_export(low_latency, strict):
    """An exported program belongs to the process, as its handle does."""
    problem, handle = low_latency

    class Step(torch.nn.Module):
        def forward(self, tokens, weights):
            received = handle.dispatch(tokens)
            return handle.combine(received.tokens * 2, weights)

    arguments = problem.tokens, problem.weights
    program = torch.export.export(Step(), arguments, strict=strict)
    same([program.module()(*arguments)], [Step()(*arguments)])
    dist.barrier()


def test_the_interface_of_deepep(world, device):
    """The graph breaks there."""
    problem = Problem(*world, hidden=256, dtype=torch.bfloat16, masked=True, device=device)
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 20, explicitly_destroy=True)

    def step(tokens, ids, weights):
        counts = buffer.get_dispatch_layout(ids, problem.num_experts)[2]
        rows, _, came, _, handle, _ = buffer.dispatch(tokens, num_tokens_per_expert=counts, topk_idx=ids,
                                                      topk_weights=weights)
        return buffer.combine(2 * rows, handle, topk_weights=came)[0]

    arguments = problem.tokens, problem.topk_idx, problem.weights
    assert torch.equal(torch.compile(step, backend="eager")(*arguments), step(*arguments))
    buffer.destroy()
