"""Triton kernels of this package, where Triton is installed and works."""

from __future__ import annotations

import functools
import importlib
import warnings
from types import ModuleType

import torch


@functools.cache
def working(name: str, device: torch.device) -> ModuleType | None:
    """The module of kernels `name`, if its `try_out` works on this GPU; determined once."""
    try:
        kernels = importlib.import_module(name)
    except ImportError:
        return None
    try:
        kernels.try_out(device)
    except Exception as error:  # such as no C compiler, or a GPU too new for Triton
        warnings.warn(f"Triton does not work here, so slower operations of torch take its place: {error}", stacklevel=2)
        return None
    return kernels
