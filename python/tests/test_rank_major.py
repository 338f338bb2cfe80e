"""Rank-major low latency: a row for each token and rank, weighed and summed by the caller, against dense torch."""

import pytest
import torch
from torch.utils._python_dispatch import BaseTorchDispatchMode

from nccl_ep import RankMajorResult
from problems import Problem

ROWS = {"hidden": 128, "dtype": torch.bfloat16}


def weighed(problem: Problem, ep, received: RankMajorResult) -> torch.Tensor:
    """What this rank's experts give for each row; NaN in rows that hold none."""
    sums = problem.mixed(received.tokens, received.topk_idx, received.topk_weights,
                         problem.local_experts(ep.num_local_experts))
    used = torch.arange(sums.shape[1], device=sums.device) < received.counts[:, None]
    return torch.where(used[..., None], sums, torch.nan).to(problem.dtype)


@pytest.mark.parametrize("settings", [{}, {"masked": True}, {"repeated": True}])
@pytest.mark.parametrize("staged", [False, True])
def test_against_dense_torch(opened, world, device, settings, staged):
    # With room by expert for ids that are repeated.
    problem, ep, handle = opened("ll", bound=18 + 2 * world[1], **ROWS, **settings)
    with handle:
        for _ in range(2):
            received = handle.dispatch(problem.tokens, problem.weights, layout="rank", send_only=staged)
            handle.complete()
            assert type(received) is RankMajorResult and received.scales is None
            assert received.tokens.shape == (world[1], ep.max_tokens_per_rank, problem.hidden)
            unused = torch.arange(ep.max_tokens_per_rank, device=device) >= received.counts[:, None]
            assert (received.topk_idx[unused] == -1).all()
            home = handle.combine(weighed(problem, ep, received), send_only=staged)
            handle.complete()
            problem.close(home, problem.dense().output)
        # Expert-major again, on the same handle.
        assert handle.dispatch(problem.tokens).tokens.shape[0] == ep.num_local_experts


def test_rows_and_weights_are_those_of_the_sources(opened, world):
    problem, ep, handle = opened("ll", **ROWS)
    with handle:
        received = handle.dispatch(problem.tokens, problem.weights, layout="rank", cast="fp8")
    assert received.scales is not None and received.scales.shape[:2] == (world[1], ep.max_tokens_per_rank)
    first = world[0] * ep.num_local_experts
    for source in range(world[1]):
        _, ids, weights, _ = problem.part(source)
        local = ids - first
        local = torch.where((local >= 0) & (local < ep.num_local_experts), local, -1)
        here = (local >= 0).any(1)
        count = int(received.counts[source])
        assert count == int(here.sum())
        assert torch.equal(received.topk_idx[source, :count], local[here])
        assert torch.equal(received.topk_weights[source, :count], weights[here])


def test_what_is_refused(opened):
    problem, ep, handle = opened("ll", **ROWS)
    with handle:
        with pytest.raises(ValueError, match="topk_weights: needed with layout"):
            handle.dispatch(problem.tokens, layout="rank")
        with pytest.raises(ValueError, match="layout: must be"):
            handle.dispatch(problem.tokens, problem.weights, layout="token")
        received = handle.dispatch(problem.tokens, problem.weights, layout="rank")
        received.tokens.zero_()
        with pytest.raises(ValueError, match="topk_weights: applied by the caller"):
            handle.combine(received.tokens, problem.weights)
        home = handle.combine(received.tokens)
        # A mode that looks on makes no difference.
        with BaseTorchDispatchMode():
            assert torch.equal(handle.combine(received.tokens), home)


@pytest.mark.parametrize("staged", [False, True])
def test_views(opened, world, device, staged):
    """Rows that stay in the library's memory: two batches at a time, on the same two places in turn."""
    problem, ep, first = opened("ll", **ROWS)
    addresses = []
    with first, ep.create_handle(problem.topk_idx) as second:
        for _ in range(3):
            views = []
            for handle in (first, second):
                received = handle.dispatch(problem.tokens, problem.weights, layout="rank", view=True,
                                           send_only=staged)
                handle.complete()
                assert received.tokens.dtype == problem.dtype and received.tokens.device == device
                assert received.tokens.shape == (world[1], ep.max_tokens_per_rank, problem.hidden)
                views.append(received)
            addresses.append([received.tokens.data_ptr() for received in views])
            for handle, received in zip((first, second), views):
                problem.close(handle.combine(weighed(problem, ep, received)), problem.dense().output)
        assert addresses[0][0] != addresses[0][1] and addresses == addresses[:1] * 3
        with torch.inference_mode():
            first.dispatch(problem.tokens, problem.weights, layout="rank", view=True, cast="fp8")
        scaled = first.dispatch(problem.tokens, problem.weights, layout="rank", view=True, cast="fp8")
        assert not scaled.tokens.is_inference()
        assert scaled.tokens.dtype == torch.float8_e4m3fn
        for refused in ({"view": True}, {"view": True, "layout": "rank", "out": views[0].tokens}):
            with pytest.raises(ValueError, match="view: needs"):
                first.dispatch(problem.tokens, problem.weights if "layout" in refused else None, **refused)
