"""The class of a dispatch's result says what is in it, as typing_cases.py tells the type checker."""

import pickle

import pytest
import torch

from nccl_ep import (DispatchResult, LowLatencyResult, LowLatencyScaledResult, ScaledResult,
                     WeightedResult, WeightedScaledResult)


def what_is_there(result: DispatchResult) -> set[str]:
    return {name for name in result._fields if getattr(result, name) is not None}


def test_low_latency(opened):
    problem, _, handle = opened("ll", dtype=torch.bfloat16)
    with handle:
        plain, scaled = handle.dispatch(problem.tokens), handle.dispatch(problem.tokens, cast="fp8")
    assert type(plain) is LowLatencyResult and what_is_there(plain) == {"tokens", "counts"}
    assert type(scaled) is LowLatencyScaledResult and what_is_there(scaled) == {"tokens", "counts", "scales"}


@pytest.mark.high_throughput
def test_high_throughput(opened):
    problem, _, handle = opened("ht", dtype=torch.bfloat16)
    routing = {"topk_idx", "topk_weights"}
    with handle:
        for weights, cast, kind, there in (
                (None, None, DispatchResult, set()), (problem.weights, None, WeightedResult, routing),
                (None, "fp8", ScaledResult, {"scales"}),
                (problem.weights, "fp8", WeightedScaledResult, {*routing, "scales"})):
            result = handle.dispatch(problem.tokens, weights, cast=cast)
            assert type(result) is kind and what_is_there(result) == {"tokens", *there}
        # What autograd returns, too.
        tokens = problem.tokens.clone().requires_grad_()
        assert type(handle.dispatch(tokens, problem.weights)) is WeightedResult
        assert type(handle.dispatch(tokens)) is DispatchResult


def test_a_result_is_a_tuple_of_five():
    rows = torch.ones(2)
    both = WeightedScaledResult(rows, None, rows, rows, rows)
    assert isinstance(both, WeightedResult) and isinstance(both, ScaledResult)
    tokens, counts, *others = both
    assert tokens is rows and counts is None and len(others) == 3
    assert type(pickle.loads(pickle.dumps(both))) is WeightedScaledResult
    with pytest.raises(AttributeError):
        both.scales = rows
