"""Outputs that a caller chooses: autograd learns that they were written to."""

import pytest
import torch

from nccl_ep import NCCLLibrary

ROWS = {"dtype": torch.bfloat16, "hidden": 128}


def saved(tensor: torch.Tensor) -> torch.Tensor:
    """A graph that needs the values of `tensor` for its backward."""
    return (torch.ones_like(tensor, requires_grad=True) * tensor).sum()


def refuses_backward(graph: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()


def test_a_graph_that_saved_an_output(opened, algorithm):
    """Its backward would compute with other values."""
    problem, ep, handle = opened(algorithm, **ROWS)
    received = handle.dispatch(problem.tokens)
    weights = problem.weights if algorithm == "ll" else None
    out, home = torch.zeros_like(received.tokens), torch.zeros_like(problem.tokens)
    graph = saved(out)
    handle.dispatch(problem.tokens, out=out)
    refuses_backward(graph)
    graph = saved(home)
    handle.combine(out, weights, out=home)
    refuses_backward(graph)
    scaled = handle.dispatch(problem.tokens, cast="fp8")
    graph = saved(scaled.scales)
    handle.dispatch(problem.tokens, cast="fp8", out_scales=scaled.scales)
    refuses_backward(graph)


@pytest.mark.high_throughput
def test_counters(group, size, device):
    ep = group(num_experts=size, hidden=8, algorithm="ht")
    counts = torch.zeros(1, dtype=torch.int32, device=device)
    before = counts._version
    ep.create_handle(torch.zeros((1, 1), dtype=torch.int64, device=device), counts=counts)
    assert counts._version > before


def test_what_a_staged_operation_writes_to(opened):
    """Its second half writes, also to a result that the package made."""
    problem, ep, handle = opened("ll", **ROWS)
    received = handle.dispatch(problem.tokens, send_only=True)
    graph, versions = saved(received.tokens), received.counts._version
    handle.complete()
    refuses_backward(graph)
    assert received.counts._version > versions
    home = handle.combine(received.tokens, problem.weights, send_only=True)
    graph = saved(home)
    handle.complete()
    refuses_backward(graph)


def test_outputs_that_require_gradients(opened, algorithm):
    """As torch's own `out`: refused, but under no_grad."""
    problem, ep, handle = opened(algorithm, **ROWS)
    weights = problem.weights if algorithm == "ll" else None
    scaled = handle.dispatch(problem.tokens, cast="fp8")
    received = handle.dispatch(problem.tokens)
    out, home = torch.zeros_like(received.tokens), torch.zeros_like(problem.tokens)
    scales = torch.zeros_like(scaled.scales)
    calls = {"out": (lambda: handle.dispatch(problem.tokens, out=out.requires_grad_()),
                     lambda: handle.combine(received.tokens, weights, out=home.requires_grad_())),
             "out_scales": (lambda: handle.dispatch(problem.tokens, cast="fp8",
                                                    out_scales=scales.requires_grad_()),)}
    for name, some in calls.items():
        for call in some:
            with pytest.raises(RuntimeError, match=f"^{name}: requires gradients.*{name}.detach"):
                call()
            with torch.no_grad():
                call()


def test_outputs_of_inference_mode(opened):
    """They have no versions, and no graph saves them."""
    problem, ep, handle = opened("ll", **ROWS)
    with torch.inference_mode():
        out = torch.empty_like(handle.dispatch(problem.tokens).tokens)
        handle.dispatch(problem.tokens, out=out)
    handle.dispatch(problem.tokens, out=out)
    handle.dispatch(problem.tokens, out=out, send_only=True)
    handle.complete()


def test_memory_for_scales(opened):
    """The library sees neither the device nor the type of what it is given."""
    problem, ep, handle = opened("ll", **ROWS)
    scales = handle.dispatch(problem.tokens, cast="fp8").scales
    for wrong, text in (([1.0], "out_scales: must be a tensor, not list"),
                        (scales.to("meta"), "out_scales: is on meta, the group on"),
                        (torch._neg_view(scales), "out_scales: must be no negative view")):
        with pytest.raises((TypeError, ValueError), match=text):
            handle.dispatch(problem.tokens, cast="fp8", out_scales=wrong)


@pytest.mark.high_throughput
def test_when_the_host_asks_how_many_rows_come(opened, monkeypatch):
    """Not with `out`, which has a number; and not before what is wrong is refused."""
    problem, ep, handle = opened("ht", **ROWS)
    ask, asked = NCCLLibrary.ncclEpHandleWaitNumRecvTokens, []
    monkeypatch.setattr(NCCLLibrary, "ncclEpHandleWaitNumRecvTokens", lambda *given: asked.append(1) or ask(*given))
    out = problem.tokens.new_empty((ep.world_size * 32, ROWS["hidden"]))
    for wrong, text in (({"cast": "fp9"}, "cast: must be"), ({"out": out.float()}, "out: has type"),
                        ({"scales_order": "tiles"}, "scales_order: must be"),
                        ({"cast": "fp8", "out_scales": out.to(torch.uint8)}, "out_scales: has type")):
        with pytest.raises(ValueError, match=text):
            handle.dispatch(problem.tokens, problem.weights, **wrong)
    handle.dispatch(problem.tokens, problem.weights, out=out)
    assert not asked
    rows = handle.dispatch(problem.tokens).tokens
    assert asked and torch.equal(rows, out[:len(rows)])


@pytest.mark.high_throughput
def test_fewer_rows_than_come(opened):
    """Refused at the call, so that the group goes on: the host knows how many come."""
    problem, ep, handle = opened("ht", **ROWS)
    received = handle.dispatch(problem.tokens)
    rows = received.tokens.shape[0]
    assert rows > 1
    text = rf"tokens.shape\[0\]: must hold all tokens .*got 1, expected {rows} or more"
    with pytest.raises(RuntimeError, match=text):
        handle.combine(received.tokens[:1])
    with pytest.raises(RuntimeError, match=text.replace("tokens.s", "out.s")):
        handle.dispatch(problem.tokens, out=received.tokens[:1])
    problem.close(handle.combine(received.tokens), problem.tokens.float() * problem.ranks)
    ep.check()
