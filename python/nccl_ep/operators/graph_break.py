"""What traced code runs between two graphs of torch.compile: dispatches with a view, and the interface of DeepEP.

A compiler may write into what it has read, and rows of a view that hold nothing must stay as they are. A module of its
own, as it takes the compiler, which takes seconds to load.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nccl_ep.results import DispatchResult

if TYPE_CHECKING:
    from nccl_ep.handle import EpHandle

_NO_VIEW = ("view: not within one graph of a compiler; without fullgraph the graph breaks there, and without view the "
            "rows are copied")
_HAS_REASON = "reason" in inspect.signature(torch.compiler.disable).parameters


@torch.compiler.disable(**{"reason": _NO_VIEW} if _HAS_REASON else {})  # type: ignore[misc, unused-ignore]
def _view_between_graphs(handle: EpHandle[Any], *arguments: Any, **options: Any) -> DispatchResult:
    return handle.dispatch(*arguments, view=True, **options)


@torch.compiler.disable  # type: ignore[misc, unused-ignore]
def between_graphs(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """`function` of these arguments."""
    return function(*arguments, **options)


def dispatch_view(handle: EpHandle[Any], *arguments: Any, **options: Any) -> DispatchResult:
    """`EpHandle.dispatch` with a view; RuntimeError where no graph can break."""
    if not torch.compiler.is_dynamo_compiling():
        raise RuntimeError(_NO_VIEW)
    result: DispatchResult = _view_between_graphs(handle, *arguments, **options)
    return result
