"""Copies, pickles and conversions of what belongs to this process, and of models that have it."""

import copy
import gc
import io
import pickle
import warnings

import pytest
import torch

from nccl_ep import NCCLLibrary
from problems import Problem

pytestmark = pytest.mark.high_throughput


class Model(torch.nn.Module):
    """One MoE layer with experts that double."""

    def __init__(self, ep) -> None:
        super().__init__()
        self.router, self.ep = torch.nn.Linear(2, 2), ep

    def forward(self, problem: Problem) -> torch.Tensor:
        return self.ep(problem.tokens, problem.topk_idx, problem.weights,
                       lambda rows, layout: 2 * rows)


@pytest.fixture
def model(layer, world, device):
    """A problem, the model, and what it makes of it."""
    problem = Problem(*world, device=device)
    made = Model(layer(problem))
    want = 2 * problem.tokens * problem.factors
    problem.close(made(problem), want)
    return problem, made


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_groups_and_handles_belong_to_their_process(model, make):
    """The text says what to do instead, and the original stays as it is."""
    problem, moe = model
    group = moe.ep._group
    handle = group.create_handle(problem.topk_idx)
    for value, text in ((group, "^EpGroup: belongs to the process .*make one on every rank"),
                        (handle, r"^EpHandle: belongs to .*group.create_handle\(topk_idx\)")):
        with pytest.raises(TypeError, match=text):
            make(value)
    gc.collect()
    handle.combine(handle.dispatch(problem.tokens).tokens)
    layout = moe.ep.dispatch(problem.tokens, problem.topk_idx)[2]
    if make is not copy.copy:
        with pytest.raises(TypeError, match="^EpHandle"):
            make(layout)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_model_shares_its_group(model, make):
    """As one for a moving average does; its own parameters are apart, if it is a deep one."""
    problem, moe = model
    other = make(moe)
    assert other.ep._group is moe.ep._group
    assert (other.router is moe.router) == (make is copy.copy)
    if make is copy.deepcopy:
        assert other.ep is not moe.ep and other.ep.ep_config == moe.ep.ep_config
    assert torch.equal(other(problem), moe(problem))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del other
        gc.collect()
    moe(problem)
    assert make(moe.ep)._group is moe.ep._group


def test_a_model_is_saved_by_its_parameters(model):
    problem, moe = model
    for save in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(TypeError, match=r"^EPAll2AllLayer: .*save model.state_dict\(\)"):
            save(moe)
    assert set(moe.state_dict()) == {"router.weight", "router.bias"}
    moe.load_state_dict(moe.state_dict())


def test_conversions_leave_the_layer_as_it_is(model):
    """A warning tells of those after which the rest of the model has another type."""
    problem, moe = model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moe.to(torch.float32).train().eval().cpu()
    with pytest.warns(UserWarning, match=r"EPAll2AllLayer \d+ still takes torch.float32, not "
                                         "torch.float16; make it with dtype=torch.float16"):
        moe.half()
    moe(problem)
    with pytest.raises(ValueError, match="input: has type torch.float16, expected torch.float32"):
        moe.ep.dispatch(problem.tokens.half(), problem.topk_idx)


def test_experts_without_weights(model):
    """`forward` has the gradients of its parts."""
    problem, moe = model
    tokens = problem.tokens.requires_grad_()
    output = moe.ep(tokens, problem.topk_idx, None, lambda rows, layout: rows)
    output.sum().backward()
    problem.close(output, tokens * problem.top_k)
    problem.close(tokens.grad, torch.full_like(tokens, problem.top_k))


def test_a_library_is_found_again():
    library = NCCLLibrary()
    for same in (pickle.loads(pickle.dumps(library)), copy.deepcopy(library)):
        assert same.path == library.path and same.ncclEpGetVersion() == library.ncclEpGetVersion()
