"""Refusals of arguments of a wrong Python type, with texts that say what to pass instead.

Without them ctypes or torch would refuse later, in words about their own functions.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, NoReturn

import torch

LARGEST = 2**32 - 1
ROW_ALIGN = 16  # bytes


def require_tensor(name: str, value: object) -> None:
    """Raises TypeError unless `value` is a torch tensor with memory of its own."""
    if isinstance(value, torch.Tensor):
        _require_memory(name, value)
        return
    hint = ""
    if isinstance(value, tuple) and hasattr(value, "tokens"):
        hint = "; pass result.tokens"
    elif isinstance(value, (list, tuple)) or hasattr(value, "__array__"):
        hint = f"; torch.as_tensor({name}) makes one"
    raise TypeError(f"{name}: must be a tensor, not {kind(value)}{hint}")


def _require_memory(name: str, value: torch.Tensor) -> None:
    """Raises TypeError for a tensor whose class keeps its elements elsewhere, or has none."""
    of = type(value)
    if of.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        why = (f"pass {name}.to_local(), this rank's part" if hasattr(value, "to_local") else
               "it has no memory; call inside its FakeTensorMode, where operators know its shape"
               if of.__name__ == "FakeTensor" else
               "pass a plain tensor, whose memory the library can read")
        raise TypeError(f"{name}: must be a plain tensor, not {of.__name__}; {why}")
    if value.is_nested or value.layout != torch.strided:
        raise TypeError(f"{name}: must be a dense tensor, not "
                        f"{'a nested one' if value.is_nested else f'one of {value.layout}'}")


def require_no_gradient(name: str, tensor: torch.Tensor) -> None:
    """Raises RuntimeError for an output that requires gradients, as torch does for its `out`."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name}: requires gradients, and what is written to it has none; pass "
                           f"{name}.detach(), or call it under torch.no_grad()")


def require_dtype(name: str, value: object, allowed: Collection[torch.dtype]) -> None:
    """Raises unless `value` is one of the `allowed` types: TypeError, or ValueError for others."""
    if not isinstance(value, torch.dtype):
        known = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
        hint = f"; write {known}" if isinstance(known, torch.dtype) else ""
        raise TypeError(f"{name}: must be a torch.dtype, not {kind(value)}{hint}")
    if value not in allowed:
        raise ValueError(f"{name}: must be one of {', '.join(map(str, allowed))}, not {value}")


def integer(name: str, value: object, least: int = 0, most: int = LARGEST) -> int:
    """`value` as an int from `least` to `most`; TypeError for floats, text and the like."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: must be an integer, not {kind(value)}") from None
    if not least <= number <= most:
        raise ValueError(f"{name}: must be {least} to {most}, not {number}")
    return number


def row_bytes(name: str, elements: object, dtype: torch.dtype) -> int:
    """Bytes of a row of so many elements, which the library takes as multiples of 16."""
    number = integer(name, elements, 1, LARGEST // dtype.itemsize)
    size = number * dtype.itemsize
    if size % ROW_ALIGN:
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(f"{name}: {number} {kind} are {size} bytes, not a multiple of {ROW_ALIGN}")
    return size


def require_group(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a torch.distributed group or None."""
    import torch.distributed as dist

    if value is None or not dist.is_available():
        return
    # What new_group returns to a process that is not in the group has another type.
    if isinstance(value, dist.ProcessGroup) or value == dist.GroupMember.NON_GROUP_MEMBER:
        return
    hint = "; pass nccl_ep.ncclComm_t(address)" if isinstance(value, int) else ""
    raise TypeError(f"{name}: must be a torch.distributed group, None for all processes, or an "
                    f"ncclComm_t, not {kind(value)}{hint}")


def cannot_be_copied(value: object, instead: str) -> NoReturn:
    """Raises TypeError for copies and pickles of what the library holds for this process."""
    raise TypeError(f"{type(value).__name__}: belongs to the process that made it, and cannot be "
                    f"copied or pickled; {instead}")


def kind(value: object) -> str:
    """The type of `value`, with the value itself where it is short."""
    name = type(value).__name__
    return f"{name} {value!r}" if isinstance(value, (str, int, float)) else name
