"""How an operator of the namespace `nccl_ep` is made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

NAMESPACE = "nccl_ep"


class Operator(Protocol):
    """What torch makes of a function; torch leaves it untyped."""

    def __call__(self, *arguments: Any) -> Any: ...

    def register_fake(self, function: _Function) -> _Function:
        """Makes `function` tell the results' shapes and types while code is traced."""

    def register_autograd(self, backward: Callable[..., Any], *,
                          setup_context: Callable[..., None]) -> None:
        """Makes `backward` its gradient."""


def define(schema: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Operator]:
    """Makes an operator with this schema out of a function, which runs without gradients.

    It is not left out of a graph, even if nobody uses what it returns: other ranks wait for it.
    """
    name, arguments = schema.split("(", 1)

    def make(function: Callable[..., Any]) -> Operator:
        @functools.wraps(function)
        def run(*given: Any, **named: Any) -> Any:
            with torch.no_grad():
                return function(*given, **named)

        operator: Operator = torch.library.custom_op(f"{NAMESPACE}::{name}", run, mutates_args=mutates,
                                           schema=f"({arguments}")
        torch.fx.node.has_side_effect(getattr(torch.ops, NAMESPACE).__getattr__(name).default)
        return operator

    return make
