"""EPAll2AllLayer as documented, and under settings of torch that a program may have changed."""

import pytest
import torch

from documents import documents, snippets
from nccl_ep.layers import EPAll2AllLayer
from nccl_ep.types import NCCL_EP_AUTO
from problems import Problem, default_dtype
from test_documents import values

pytestmark = pytest.mark.high_throughput

_LAYERS = [pytest.param(code, id=path.name) for path in documents() for code in snippets(path)
           if "= layer.combine(" in code and "EPAll2AllLayer(" in code and "no_grad" not in code]


def there_and_back(ep: EPAll2AllLayer, problem: Problem, **options) -> torch.Tensor:
    """A round trip with identity experts; the results have the weights applied."""
    rows, weights, layout = ep.dispatch(problem.tokens, problem.topk_idx, problem.weights,
                                        **options)
    return ep.combine(rows * weights[:, None], layout)


def expected(problem: Problem) -> torch.Tensor:
    """The expected result of `there_and_back`."""
    return problem.tokens.float() * problem.factors


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("code", _LAYERS)
def test_the_documented_example(rank, size, device, code, autocast):
    """With gradients: bfloat16 tokens and float32 weights."""
    problem = Problem(rank, size, dtype=torch.bfloat16, masked=True, device=device, seed=3)
    tokens = problem.tokens.requires_grad_()
    problem.weights.requires_grad_()
    names = values(problem, size)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        # Backward needs the layer, which the code may close.
        exec(code.replace("layer.finalize()", ""), names)
    assert names["output"].dtype == torch.bfloat16
    problem.same(names["output"], 2 * tokens.float() * problem.factors)
    names["layer"].finalize()


@pytest.mark.parametrize("setting", [
    lambda: default_dtype(torch.bfloat16), lambda: torch.device("meta"), torch.inference_mode],
    ids=["default dtype", "default device", "inference mode"])
def test_settings_of_torch_do_not_matter(layer, world, device, setting):
    """The layer is created and used under the setting, then used again without it."""
    problem = Problem(*world, dtype=torch.bfloat16, device=device)
    with setting():
        ep = layer(problem)
        problem.close(there_and_back(ep, problem), expected(problem))
        rows, _, layout = ep.dispatch(problem.tokens, problem.topk_idx)
        problem.close(ep.combine(rows, layout), problem.tokens.float() * problem.top_k)
    problem.close(there_and_back(ep, problem), expected(problem))


def test_tensors_that_are_not_contiguous(layer, world, device):
    """Columns of wider tensors, and gradients that expand a single number."""
    problem = Problem(*world, device=device)
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
    problem.close(problem.tokens.grad, problem.factors.expand(-1, problem.hidden))


def test_the_callers_ids_may_change(layer, world, device):
    """The layout has its own copy, even if the caller's ids have the layout's type."""
    problem = Problem(*world, device=device)
    ids = problem.topk_idx.to(torch.int32)
    ep = layer(problem)
    rows, _, layout = ep.dispatch(problem.tokens, ids)
    ids.zero_()
    assert torch.equal(layout.topk_indices_tensor.long(), problem.topk_idx)
    problem.close(ep.combine(rows, layout), problem.tokens * problem.top_k)


def test_sms_of_communication(layer, world, device, monkeypatch):
    """Two SMs per channel, at least one channel; 0 leaves the choice to the library."""
    problem = Problem(*world, device=device)
    made = []
    real = EPAll2AllLayer.__init__.__globals__["EpGroup"]

    def spy(*arguments, **settings):
        made.append(settings["num_channels"])
        return real(*arguments, **settings)

    monkeypatch.setitem(EPAll2AllLayer.__init__.__globals__, "EpGroup", spy)
    for num_sm in (0, 1, 2, 5):
        layer(problem, num_sm=num_sm)
    assert made == [NCCL_EP_AUTO, 1, 1, 2]
