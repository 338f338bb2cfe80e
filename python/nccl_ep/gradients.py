"""Which operations autograd is to record, and refusals of those whose gradients would be dropped."""

from __future__ import annotations

import torch


def needs_gradient(tokens: torch.Tensor, weights: torch.Tensor | None,
                   scales: torch.Tensor | None = None) -> bool:
    """Whether autograd is to record an operation on these tensors."""
    return torch.is_grad_enabled() and (
        tokens.requires_grad or weights is not None and weights.requires_grad
        or scales is not None and scales.requires_grad)


def check_differentiable(algorithm: str, operation: str, plain: bool) -> None:
    """Refuses an operation whose tensors require gradients that it would drop."""
    if algorithm == "ht" and plain:
        return
    why = ("low latency has no gradients" if algorithm == "ll" else
           "it has no gradient" if operation == "combine_with_weights" else
           "with out, send_only, stream or scales it has no gradient")
    raise RuntimeError(f"{operation}: its tensors require gradients, but {why}; call it under "
                       "torch.no_grad(), or with detached tensors")
