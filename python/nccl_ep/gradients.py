"""Which operations autograd or torch.func is to record, what these need, and refusals of gradients that would be
dropped, or wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch.autograd import forward_ad

_Method = TypeVar("_Method", bound=Callable[..., Any])
# Bound once: each operation asks.
is_transformed = torch._C._are_functorch_transforms_active


def needs_gradient(tokens: torch.Tensor, weights: torch.Tensor | None,
                   scales: torch.Tensor | None = None) -> bool:
    """Whether autograd is to record an operation on these tensors, or torch.func or forward mode transforms it."""
    return torch.is_grad_enabled() and (
        tokens.requires_grad or weights is not None and weights.requires_grad
        or scales is not None and scales.requires_grad) or is_transformed() or (
        forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()
        and any(each is not None and forward_ad.unpack_dual(each).tangent is not None
                for each in (tokens, weights, scales)))


def without_gradients(method: _Method) -> _Method:
    """`torch.no_grad` for a method, at no cost where gradients are off already. A compiler's graph breaks there."""
    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            from nccl_ep.operators.graph_break import between_graphs

            return between_graphs(call, *arguments, **options)
        if not torch.is_grad_enabled():
            return method(*arguments, **options)
        with torch.no_grad():
            return method(*arguments, **options)

    return cast("_Method", call)


def rows_in_graph(handle: Any, tokens: torch.Tensor, rows: int | None,
                  dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """Memory for so many rows, or as many as may come, of a dispatch in a graph; None: the dispatch makes it.

    By expert zeros, if that is more than come: nothing is written behind the rows of all experts, and gradients read
    there, too.
    """
    if rows is None:
        return tokens.new_zeros((handle.num_recv_tokens, tokens.shape[1]), dtype=dtype) if has_rest(handle) else None
    new = tokens.new_zeros if handle.expert_alignment else tokens.new_empty
    return new((rows, tokens.shape[1]), dtype=dtype)


def has_rest(handle: Any) -> bool:
    """Whether rows by expert have something behind them in new tensors: without a bound their number is exact."""
    return bool(handle.expert_alignment and handle.group.max_tokens_per_rank)


def check_routing(handle: Any, routing: int) -> None:
    """Refuses a backward of an operation that had another routing."""
    if handle.routing != routing:
        raise RuntimeError("update: the handle has another routing than at the operation whose backward this is; "
                           "run the backward before, or take another handle")


def apply(function: Any, *arguments: Any) -> Any:
    """`function.apply` of an autograd.Function, which torch does not type."""
    return function.apply(*arguments)


def check_differentiable(algorithm: str, operation: str, plain: bool) -> None:
    """Refuses an operation whose tensors require gradients that it would drop."""
    if algorithm == "ht" and plain:
        return
    why = ("low latency has no gradients" if algorithm == "ll" else
           "it has no gradient" if operation == "combine_with_weights" else
           "with out, send_only, stream or scales it has no gradient")
    if is_transformed():
        raise RuntimeError(f"{operation}: torch.func cannot transform it, as {why}; call it outside")
    raise RuntimeError(f"{operation}: its tensors require gradients, but {why}; call it under "
                       "torch.no_grad(), or with detached tensors")


def without_transforms() -> AbstractContextManager[object]:
    """Code that torch.func does not see: elsewhere each new tensor belongs to a transform, and has no memory."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def plain(name: str, integers: torch.Tensor) -> torch.Tensor:
    """The plain ids or counts, an argument called `name`, behind those that torch.func passes; they have no gradient.
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(integers):
        if functorch.is_batchedtensor(integers):
            raise RuntimeError(f"{name}: a routing is no matter of vmap; make the handle outside")
        integers = functorch.get_unwrapped(integers)
    return integers
