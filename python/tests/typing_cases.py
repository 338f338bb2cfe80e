"""What a type checker knows of the results of `EpHandle.dispatch`; never run.

The step `python/types` checks it by mypy --strict, to which a comment that ignores no complaint is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nccl_ep import (DispatchResult, EpHandle, ScaledResult, WeightedResult, WeightedScaledResult)
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
