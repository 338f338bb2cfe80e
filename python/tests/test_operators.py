"""The operators of `torch.ops.nccl_ep`, by tracers that cost little; test_compiled.py compiles."""

import inspect

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from nccl_ep import Choice
from nccl_ep.operators.numbers import ticket

pytestmark = [pytest.mark.high_throughput, pytest.mark.usefixtures("two_ranks")]


class Seen(TorchDispatchMode):
    """Notes the operators of this package that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function.namespace == "nccl_ep":
            self.names.append(function._opname)
        return function(*arguments, **(named or {}))


@pytest.fixture(params=[32, 0], ids=["bound", "auto"])
def high_throughput(opened, request):
    """A problem and a handle of high throughput."""
    return opened("ht", bound=request.param, masked=True)[::2]


def valid(received):
    """The rows of low latency that are tokens, and their scales."""
    here = [(received.tokens[expert, :count], None if received.scales is None else
             received.scales[expert, :count]) for expert, count in enumerate(received.counts.tolist())]
    return ([rows.view(torch.uint8) for rows, _ in here], [scales for _, scales in here])


@pytest.mark.parametrize("cast", [None, "fp8"])
@pytest.mark.parametrize("staged", [False, True])
def test_rank_major_rows_in_a_graph(low_latency, cast, staged):
    problem, handle = low_latency

    def step(tokens, weights):
        received = handle.dispatch(tokens, weights, layout="rank", cast=cast, send_only=staged)
        handle.complete()
        factors = torch.where(received.topk_idx >= 0, received.topk_weights, 0.0).sum(dim=2, keepdim=True)
        rows = received.tokens if cast is None else received.tokens.float() * received.scales
        sums = handle.combine((torch.where(factors > 0, rows, 0) * factors).to(torch.bfloat16), send_only=staged)
        handle.complete()
        return sums, received.counts, received.topk_idx

    want = step(problem.tokens, problem.weights)
    graph = make_fx(step)(problem.tokens, problem.weights)
    names = [node.target._opname for node in graph.graph.nodes
             if getattr(node.target, "namespace", "") == "nccl_ep" and "complete" not in node.target._opname]
    assert names == ["ll_dispatch", "ll_combine"]
    assert all(map(torch.equal, graph(problem.tokens, problem.weights), want))


@pytest.mark.parametrize("order", ["row", "column"])
def test_scales_are_seen_by_dispatch_modes(low_latency, order):
    problem, handle = low_latency
    want = handle.dispatch(problem.tokens, cast="fp8", scales_order=order)
    with Seen() as seen:
        have = handle.dispatch(problem.tokens, cast="fp8", scales_order=order)
        outputs = [torch.empty_like(each) for each in (have.tokens, have.scales)]
        given = handle.dispatch(problem.tokens, cast="fp8", scales_order=order, out=outputs[0],
                                out_scales=outputs[1])
    assert seen.names == ["ll_dispatch"] * 2
    assert have.scales.stride() == want.scales.stride()
    assert given.tokens is outputs[0] and given.scales is outputs[1]
    for got in (have, given):
        for one, other in zip(valid(got), valid(want)):
            assert all(map(torch.equal, one, other))


def test_a_staged_operation_in_a_graph(low_latency):
    """The receive phase is an operator that changes the results of the send phase."""
    problem, handle = low_latency

    def step(tokens, weights):
        received = handle.dispatch(tokens, send_only=True)
        handle.complete()
        output = handle.combine(received.tokens, weights, send_only=True)
        handle.complete()
        return output, received.counts

    want = step(problem.tokens, problem.weights)
    graph = make_fx(step)(problem.tokens, problem.weights)
    names = [node.target._opname for node in graph.graph.nodes
             if getattr(node.target, "namespace", "") == "nccl_ep"]
    assert names == ["ll_dispatch", "ll_complete", "ll_combine", "ll_complete"]
    # So nothing else gets their memory before.
    sent, received = (node for node in graph.graph.nodes if "ll_complete" in str(node.target))
    tokens, weights = (node for node in graph.graph.nodes if node.op == "placeholder")
    assert tokens in sent.args[1] and weights in received.args[1]
    assert all(map(torch.equal, graph(problem.tokens, problem.weights), want))


def test_rows_behind_all_experts_have_no_gradient(opened, poisoned):
    """Whatever is in the memory that the gradient of a combine comes to."""
    problem, ep, _ = opened("ht", bound=32, masked=True)
    handle = ep.open_handle(expert_alignment=4)
    handle.update(problem.topk_idx)
    rows = ep.most_rows(handle.top_k, 4)
    got = torch.ops.nccl_ep.ht_dispatch(problem.tokens, handle.topk_idx, handle.ticket, handle.number, ep.number, rows,
                                        True)
    assert got.shape[0] == rows and torch.isfinite(got).all() and got.any()


def test_high_throughput_has_the_same_gradients(high_throughput):
    problem, handle = high_throughput

    tokens, weights = problem.tokens.requires_grad_(), problem.weights.requires_grad_()

    def run():
        received = handle.dispatch(tokens, weights)
        factors = received.topk_weights.sum(dim=1, keepdim=True)
        output = handle.combine(handle.dispatch(tokens).tokens * factors)
        return output, *problem.gradients(output)

    with Seen() as seen:
        results = run()
    for have, want in zip(results, run()):
        problem.close(have, want)
    assert seen.names.count("ht_dispatch_weighted") == 1
    assert "ht_combine_with_weights" in seen.names


def test_other_operations_of_high_throughput(high_throughput):
    problem, handle = high_throughput
    tokens, weights = problem.tokens, problem.weights
    rows = handle.num_recv_tokens

    def run():
        plain = handle.dispatch(tokens, cast="fp8")
        weighted = handle.dispatch(tokens.to(torch.bfloat16), weights,
                                   scales=tokens[:, :2].contiguous())
        given = handle.dispatch(tokens, weights, out=torch.empty((rows, 16), device=tokens.device))
        home = handle.combine_with_weights(given.tokens, given.topk_weights)
        handle.complete()
        return plain, weighted, given, home

    wanted = run()
    with Seen() as seen:
        have = run()
    assert set(seen.names) == {"ht_ticket", "ht_dispatch_scaled", "ht_dispatch_weighted",
                               "ht_combine_with_weights"}
    for one, other in zip(have, wanted):
        assert type(one) is type(other)
        for got, want in zip(one, other):
            assert (got is None) == (want is None)
            assert got is None or torch.equal(got.float(), want.float())


def test_a_handle_that_a_graph_makes(opened, device):
    """Its ticket keeps it for the backward, also where a hook saves a copy."""
    problem, ep, _ = opened("ht")
    tokens = problem.tokens.requires_grad_()
    with Seen() as seen, torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copy: copy):
        counts = torch.empty(ep.num_local_experts, dtype=torch.int32, device=device)
        with ep.create_handle(problem.topk_idx, counts=counts) as handle:
            output = handle.combine(handle.dispatch(tokens).tokens)
    del handle
    output.backward(problem.grad)
    assert seen.names[0] == "ht_create_handle"
    want = torch.empty_like(counts)
    ep.create_handle(problem.topk_idx, counts=want).close()
    assert torch.equal(counts, want) and tokens.grad is not None


def test_a_handle_that_a_mode_sees_has_all_words(opened):
    """Of `EpHandle`; an update, as there, and a choice, which is for its call alone."""
    problem, ep, plain = opened("ht")
    others = {"handle", "reread", "drop_ids", "routing", "keeps_ids", "expert_alignment", "max_rows"}
    other_ids = problem.topk_idx.flip(0).contiguous()
    with Seen():
        handle = ep.create_handle(other_ids)
        handle.update(problem.topk_idx)
        assert handle.topk_idx is problem.topk_idx
        received = handle.dispatch(problem.tokens, layout="expert", choice=Choice(blocks=2))
        sums = handle.combine(received.tokens, choice=Choice(blocks=2))
        for call, text in ((lambda: handle.dispatch(problem.tokens, layout="rank"), "layout: only low latency"),
                           (lambda: handle.dispatch(problem.tokens, view=True), "view: needs layout"),
                           (lambda: handle.combine(received.tokens, problem.weights), "topk_weights: combine_with")):
            with pytest.raises(ValueError, match=text):
                call()
    assert not any(ep.choices.values())
    assert torch.equal(sums, plain.combine(plain.dispatch(problem.tokens).tokens))
    for name in dir(plain):
        if name[0] != "_" and callable(getattr(plain, name)) and name not in others:
            wanted = inspect.signature(getattr(plain, name)).parameters
            assert list(inspect.signature(getattr(handle, name)).parameters) == list(wanted)


def test_a_view_of_parameters(low_latency):
    """As selective checkpointing sees it, whose mode only looks on."""
    problem, handle = low_latency
    tokens = torch.nn.Parameter(problem.tokens, requires_grad=False)
    want = handle.dispatch(tokens, problem.weights, layout="rank")
    with Seen():
        have = handle.dispatch(tokens, problem.weights, layout="rank", view=True)
    assert torch.equal(have.counts, want.counts)


def test_shapes_without_memory(low_latency, high_throughput):
    """Fakes know shapes and types; of high throughput without a bound nobody does."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    problem, handle = low_latency
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tokens = mode.from_tensor(problem.tokens)
        received = handle.dispatch(tokens, cast="ue8m0")
        output = handle.combine(torch.empty_like(received.tokens, dtype=torch.bfloat16),
                                problem.weights)
    with pytest.raises(TypeError, match="^tokens: .*not FakeTensor; it has no memory; call inside its FakeTensorMode"):
        handle.dispatch(tokens)
    ep = handle.group
    assert received.tokens.shape == (ep.num_local_experts, 32 * ep.world_size, 128)
    assert received.scales.dtype == torch.uint8 and output.shape == problem.tokens.shape
    problem, handle = high_throughput
    if handle.group.max_tokens_per_rank:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            received = handle.dispatch(mode.from_tensor(problem.tokens), problem.weights)
        assert received.tokens.shape == (32 * ep.world_size, 16)
        assert received.topk_idx.shape == received.topk_weights.shape


def test_a_tracer_without_memory_leaves_the_handle(low_latency, opened):
    """What it writes it alone reads."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    problem, handle = low_latency
    with FakeTensorMode(allow_non_fake_inputs=True):
        handle.dispatch(problem.tokens, send_only=True)
    assert handle.staged_outputs == handle.staged_inputs == []
    problem, ep, _ = opened("ht", bound=32)
    handle = ep.open_handle()
    handle.update(problem.topk_idx)
    want = handle.combine(handle.dispatch(problem.tokens).tokens)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        handle.update(mode.from_tensor(problem.topk_idx[:1]))
        sums = handle.combine(handle.dispatch(problem.tokens[:1]).tokens)
    assert sums.shape == (1, 16) and type(handle.topk_idx) is torch.Tensor
    assert torch.equal(handle.combine(handle.dispatch(problem.tokens).tokens), want)


def test_numbers_tell_the_configuration(group):
    """A graph of another process, which a compiler found again on the disk, must not fit."""
    made = [group(num_experts=4 * (1 + (most == 8)), hidden=16, dtype=torch.float32,
                  max_tokens_per_rank=most, algorithm=kind) for kind in ("ll", "ht") for most in (4, 8, 4)]
    sums = [each.number >> 20 for each in made]
    assert len({each.number for each in made}) == 6 and len(set(sums)) == 4
    assert sums[0] == sums[2] and max(each.number for each in made) < 2**53


def test_numbers_of_what_is_gone(low_latency):
    problem, handle = low_latency
    call = torch.ops.nccl_ep.ll_combine
    kept = ticket(handle, handle.number)
    number, rows = handle.number, handle.dispatch(problem.tokens).tokens
    handle.close()
    for dead in (number, 10**9):
        with pytest.raises(RuntimeError, match=f"handle: number {dead} does not exist in this process.*saved tensors"):
            call(rows, problem.topk_idx, problem.weights, dead, False)
    assert kept.tolist() == [number]


def test_what_is_traced_refuses(low_latency):
    problem, handle = low_latency
    with Seen():
        for call, text in (
                (lambda: handle.dispatch(problem.tokens, problem.weights), "topk_weights: in low"),
                (lambda: handle.combine(problem.tokens), "topk_weights: needed in low"),
                (lambda: handle.dispatch(problem.tokens, out=problem.tokens, send_only=True),
                 "out: must be None in a staged"),
                (lambda: handle.combine_with_weights(problem.tokens, problem.weights), "combine_with")):
            with pytest.raises(ValueError, match=text):
                call()
        with pytest.raises(RuntimeError, match="create_handle: compiled code makes no handles"):
            handle.group.create_handle(problem.topk_idx)
