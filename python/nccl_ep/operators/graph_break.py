"""A dispatch with a view in traced code: between two graphs of torch.compile.

A compiler may write into what it has read, and rows of a view that hold nothing must stay as they are. A module of its
own, as it takes the compiler, which takes seconds to load.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from nccl_ep.results import DispatchResult

if TYPE_CHECKING:
    from nccl_ep.handle import EpHandle

_NO_VIEW = ("view: not within one graph of a compiler; without fullgraph the graph breaks there, and without view the rows "
            "are copied")
_HAS_REASON = "reason" in inspect.signature(torch.compiler.disable).parameters


@torch.compiler.disable(**{"reason": _NO_VIEW} if _HAS_REASON else {})  # type: ignore[misc, unused-ignore]
def _between_graphs(handle: EpHandle[Any], *arguments: Any, **options: Any) -> DispatchResult:
    return handle.dispatch(*arguments, view=True, **options)


def dispatch_view(handle: EpHandle[Any], *arguments: Any, **options: Any) -> DispatchResult:
    """`EpHandle.dispatch` with a view; RuntimeError where no graph can break."""
    if not torch.compiler.is_dynamo_compiling():
        raise RuntimeError(_NO_VIEW)
    result: DispatchResult = _between_graphs(handle, *arguments, **options)
    return result
