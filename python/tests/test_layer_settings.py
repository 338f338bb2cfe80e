"""EPAll2AllLayer as documented, and under settings of torch that a program may have changed."""

from __future__ import annotations

import contextlib
import pathlib
import re

import pytest
import torch

from nccl_ep.layers import EPAll2AllLayer
from nccl_ep.types import NCCL_EP_AUTO
from problems import Problem

pytestmark = pytest.mark.high_throughput

ROOT = pathlib.Path(__file__).resolve().parents[2]


def snippet(document: str) -> str:
    """The code in a document that shows the layer."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
    [found] = [block for block in blocks if "EPAll2AllLayer(" in block]
    return found


def there_and_back(ep: EPAll2AllLayer, problem: Problem, **options) -> torch.Tensor:
    """A round trip with identity experts; the results have the weights applied."""
    rows, weights, layout = ep.dispatch(problem.tokens, problem.topk_idx, problem.weights,
                                        **options)
    return ep.combine(rows * weights[:, None], layout)


def expected(problem: Problem) -> torch.Tensor:
    """The expected result of `there_and_back`."""
    taken = torch.where(problem.topk_idx >= 0, problem.weights, 0.0)
    return problem.tokens.float() * taken.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("document", ["README.md", "docs/python.md"])
def test_the_documented_example(world, device, document, autocast):
    """Unchanged: bfloat16 tokens, float32 weights, and gradients of both."""
    rank, size = world
    problem = Problem(rank, size, dtype=torch.bfloat16, masked=True, device=device, seed=3)
    tokens, weights = problem.tokens.requires_grad_(), problem.weights.requires_grad_()
    names = {"EPAll2AllLayer": EPAll2AllLayer, "ep_group": None, "max_tokens": 4, "rank": rank,
             "hidden": problem.hidden, "topk": problem.top_k, "num_experts": problem.num_experts,
             "num_tot_experts": problem.num_experts, "world_size": size, "local_world_size": size,
             "tokens": tokens, "input": tokens, "expert_ids": problem.topk_idx,
             "exp_indices": problem.topk_idx, "gate_weights": weights, "weight": weights,
             "experts": lambda rows: rows * 2}
    code = snippet(document).replace("layer.finalize()", "")
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        exec(code, names)
    names["output"].backward(problem.grad)
    names["layer"].finalize()

    want_tokens, want_weights = (each.detach().float().requires_grad_()
                                 for each in (tokens, weights))
    taken = torch.where(problem.topk_idx >= 0, want_weights, 0.0)
    want = 2 * want_tokens * taken.sum(dim=1, keepdim=True)
    want.backward(problem.grad.float())
    assert names["output"].dtype == torch.bfloat16
    problem.close(names["output"], want)
    problem.close(tokens.grad, want_tokens.grad)
    problem.close(weights.grad, want_weights.grad)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("setting", [
    lambda: default_dtype(torch.bfloat16), lambda: torch.device("meta"), torch.inference_mode],
    ids=["default dtype", "default device", "inference mode"])
def test_settings_of_torch_do_not_matter(layer, world, device, setting):
    """The layer is created and used under the setting, then used again without it."""
    rank, size = world
    problem = Problem(rank, size, dtype=torch.bfloat16, device=device)
    with setting():
        ep = layer(problem)
        problem.close(there_and_back(ep, problem), expected(problem))
        rows, _, layout = ep.dispatch(problem.tokens, problem.topk_idx)
        problem.close(ep.combine(rows, layout), problem.tokens.float() * problem.top_k)
    problem.close(there_and_back(ep, problem), expected(problem))


def test_tensors_that_are_not_contiguous(layer, world, device):
    """Columns of wider tensors, and gradients that expand a single number."""
    rank, size = world
    problem = Problem(rank, size, device=device)
    want = expected(problem)
    for name in ("tokens", "topk_idx", "weights"):
        narrow = getattr(problem, name)
        wide = torch.cat([narrow, narrow], dim=1)[:, :narrow.shape[1]]
        assert not wide.is_contiguous()
        setattr(problem, name, wide)
    problem.tokens.requires_grad_()
    output = there_and_back(layer(problem), problem)
    problem.close(output, want)
    output.sum().backward()
    problem.close(problem.tokens.grad, problem.weights.sum(dim=1, keepdim=True)
                  .expand(-1, problem.hidden))


def test_the_callers_ids_may_change(layer, world, device):
    """The layout has its own copy, even if the caller's ids have the layout's type."""
    rank, size = world
    problem = Problem(rank, size, device=device)
    ids = problem.topk_idx.to(torch.int32)
    ep = layer(problem)
    rows, _, layout = ep.dispatch(problem.tokens, ids)
    ids.zero_()
    assert torch.equal(layout.topk_indices_tensor.long(), problem.topk_idx)
    problem.close(ep.combine(rows, layout), problem.tokens * problem.top_k)


def test_sms_of_communication(layer, world, device, monkeypatch):
    """Two SMs per channel, at least one channel; 0 leaves the choice to the library."""
    rank, size = world
    problem = Problem(rank, size, device=device)
    made = []
    real = EPAll2AllLayer.__init__.__globals__["EpGroup"]

    def spy(*arguments, **settings):
        made.append(settings["num_channels"])
        return real(*arguments, **settings)

    monkeypatch.setitem(EPAll2AllLayer.__init__.__globals__, "EpGroup", spy)
    for num_sm in (0, 1, 2, 5):
        layer(problem, num_sm=num_sm)
    assert made == [NCCL_EP_AUTO, 1, 1, 2]
