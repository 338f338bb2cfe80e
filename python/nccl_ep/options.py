"""Keyword arguments that all ways to call `EpHandle.dispatch` have, for type checkers."""

from __future__ import annotations

from typing import Any, TypedDict

import torch

from nccl_ep.choices import Choice
from nccl_ep.scales import CastName, ScalesOrder


class Options(TypedDict, total=False):
    """Where it writes, how and where it runs."""

    out: torch.Tensor | None
    send_only: bool
    stream: Any
    choice: Choice | None


class ScaledOptions(Options, total=False):
    """And where scales go."""

    scales_order: ScalesOrder
    out_scales: torch.Tensor | None


class AnyOptions(ScaledOptions, total=False):
    """And which scales, if any."""

    scales: torch.Tensor | None
    cast: CastName | None


class RankOptions(AnyOptions, total=False):
    """And whether rank-major rows stay in the library's memory."""

    view: bool
