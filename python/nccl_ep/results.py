"""What a dispatch delivers: a class for each kind, by which type checkers know what is there."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DispatchResult(NamedTuple):
    """What a dispatch delivers to this rank.

    LL: tokens [L, R*M, H], of which expert e has the first counts[e] rows; counts int32 [L].
    LL with layout "rank": tokens [R, M, H], of which source rank r has the first counts[r] rows;
    counts int32 [R]; topk_idx int64 [R, M, K], local ids where the token's experts are here, else
    -1, as in all other rows; topk_weights float32 [R, M, K].
    Scales, if rows have them: [L, R*M, S], [R, M, S] or [n, S].
    HT: tokens [n, H], one row per received token, by source rank and token; with weights also
    topk_idx int64 [n, K], local ids ascending, then -1, and topk_weights float32 [n, K], then 0.
    HT by expert (`EpGroup.open_handle`): tokens [P, H], and topk_weights float32 [P].
    """

    tokens: torch.Tensor
    counts: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    scales: torch.Tensor | None = None


class LowLatencyResult(DispatchResult):
    """That of low latency: counts are there."""

    __slots__ = ()
    counts: torch.Tensor


class WeightedResult(DispatchResult):
    """That of a dispatch with weights: ids and weights are there."""

    __slots__ = ()
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


class ScaledResult(DispatchResult):
    """That of a dispatch with scales or a cast: scales are there."""

    __slots__ = ()
    scales: torch.Tensor


class WeightedScaledResult(WeightedResult, ScaledResult):  # type: ignore[misc]  # the tuples differ in types
    """That of a dispatch with both."""

    __slots__ = ()


class RankMajorResult(LowLatencyResult, WeightedResult):  # type: ignore[misc]  # as above
    """That of low latency with layout "rank": counts, ids and weights are there, and maybe scales."""

    __slots__ = ()


class LowLatencyScaledResult(LowLatencyResult, ScaledResult):  # type: ignore[misc]  # as above
    """That of low latency with scales."""

    __slots__ = ()


def result_class(low_latency: bool, weighted: bool, scaled: bool) -> type[DispatchResult]:
    """The class of a result of low latency, with weights, and with scales."""
    if low_latency and weighted:
        return RankMajorResult
    if low_latency:
        return LowLatencyScaledResult if scaled else LowLatencyResult
    if weighted:
        return WeightedScaledResult if scaled else WeightedResult
    return ScaledResult if scaled else DispatchResult
