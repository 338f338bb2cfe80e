"""What a type checker knows of the results of `EpHandle.dispatch`; never run.

The step `python/types` checks it by mypy --strict, to which a comment that ignores no complaint is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nccl_ep import (DispatchResult, EpGroup, EpHandle, LowLatencyResult, LowLatencyScaledResult,
                     RankMajorResult, ScaledResult, WeightedResult, WeightedScaledResult)
from nccl_ep.modes import Algorithm
from nccl_ep.scales import CastName

if TYPE_CHECKING:
    from typing_extensions import assert_type


def results(handle: EpHandle, tokens: torch.Tensor, weights: torch.Tensor,
            scales: torch.Tensor) -> None:
    """The arguments decide what is there."""
    plain = handle.dispatch(tokens)
    assert_type(plain, DispatchResult)
    assert_type(plain.topk_weights, torch.Tensor | None)
    weighted = handle.dispatch(tokens, weights)
    assert_type(weighted, WeightedResult)
    assert_type(weighted.topk_weights, torch.Tensor)
    assert_type(weighted.scales, torch.Tensor | None)
    assert_type(handle.dispatch(tokens, topk_weights=weights).topk_idx, torch.Tensor)
    scaled = handle.dispatch(tokens, scales=scales, scales_order="column")
    assert_type(scaled, ScaledResult)
    assert_type(scaled.scales, torch.Tensor)
    assert_type(scaled.topk_idx, torch.Tensor | None)
    assert_type(handle.dispatch(tokens, cast="fp8", send_only=True), ScaledResult)
    both = handle.dispatch(tokens, weights, cast="mxfp8", out_scales=scales)
    assert_type(both, WeightedScaledResult)
    assert_type((both.topk_idx, both.scales), tuple[torch.Tensor, torch.Tensor])
    assert_type(handle.dispatch(tokens, weights, scales=scales), WeightedScaledResult)


def experts(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Wants counts, as those of low latency do."""
    return rows * counts


def modes(ids: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor,
          algorithm: Algorithm) -> None:
    """A group of low latency, the default, has results with counts; of another they are unknown."""
    with EpGroup(8, 64, max_tokens_per_rank=4) as group, group.create_handle(ids) as handle:
        received = handle.dispatch(tokens)
        assert_type(received, LowLatencyResult)
        handle.combine(experts(received.tokens, received.counts), weights)
        scaled = handle.dispatch(tokens, cast="fp8")
        assert_type(scaled, LowLatencyScaledResult)
        assert_type((scaled.counts, scaled.scales), tuple[torch.Tensor, torch.Tensor])
        assert_type(either(handle), DispatchResult)
        ranks = handle.dispatch(tokens, weights, layout="rank", cast="fp8")
        assert_type(ranks, RankMajorResult)
        assert_type((ranks.counts, ranks.topk_idx), tuple[torch.Tensor, torch.Tensor])
        assert_type(ranks.scales, torch.Tensor | None)
        handle.combine(ranks.tokens)
    named = EpGroup(8, 64, algorithm="ll", max_tokens_per_rank=4)
    assert_type(named.create_handle(ids).dispatch(tokens), LowLatencyResult)
    high = EpGroup(8, 64, algorithm="ht")
    assert_type(high.create_handle(ids).dispatch(tokens), DispatchResult)
    assert_type(high.create_handle(ids).dispatch(tokens, weights), WeightedResult)
    some = EpGroup(8, 64, algorithm=algorithm)
    assert_type(some.create_handle(ids).dispatch(tokens).counts, torch.Tensor | None)


def either(handle: EpHandle) -> DispatchResult:
    """Takes a handle of any mode."""
    return handle.dispatch(torch.empty(1))


def what_may_be_missing(handle: EpHandle, tokens: torch.Tensor, weights: torch.Tensor | None,
                        scales: torch.Tensor | None, cast: CastName | None) -> None:
    """Arguments that may be None leave it open."""
    assert_type(handle.dispatch(tokens, weights, scales=scales, cast=cast), DispatchResult)
    assert_type(handle.dispatch(tokens, tokens, scales=scales), WeightedResult)
    assert_type(handle.dispatch(tokens, weights, cast="fp8"), DispatchResult)


def more_is_also_less(handle: EpHandle, tokens: torch.Tensor) -> DispatchResult:
    """A function that takes less takes a result with more."""
    both = handle.dispatch(tokens, tokens, cast="fp8")
    scaled: ScaledResult = both
    weighted: WeightedResult = both
    return scaled or weighted


def mistakes(handle: EpHandle, tokens: torch.Tensor) -> None:
    """What is refused when a program runs, or may be None, is a complaint."""
    handle.dispatch(tokens).topk_weights.sum()  # type: ignore[union-attr]
    handle.dispatch(tokens, tokens).scales.numel()  # type: ignore[union-attr]
    handle.dispatch(tokens, cast="fp9")  # type: ignore[call-overload]
    handle.dispatch([0.0])  # type: ignore[call-overload]
    EpGroup(8, 64)  # type: ignore[call-overload]
