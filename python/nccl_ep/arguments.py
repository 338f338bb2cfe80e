"""Refusals of arguments of a wrong Python type, with texts that say what to pass instead.

Without them ctypes or torch would refuse later, in words about their own functions.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch

LARGEST = 2**32 - 1


def require_tensor(name: str, value: object) -> None:
    """Raises TypeError unless `value` is a torch tensor."""
    if isinstance(value, torch.Tensor):
        return
    convertible = isinstance(value, (list, tuple)) or hasattr(value, "__array__")
    hint = f"; torch.as_tensor({name}) makes one" if convertible else ""
    raise TypeError(f"{name}: must be a tensor, not {_kind(value)}{hint}")


def require_dtype(name: str, value: object, allowed: Collection[torch.dtype]) -> None:
    """Raises unless `value` is one of the `allowed` types: TypeError, or ValueError for others."""
    if not isinstance(value, torch.dtype):
        known = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
        hint = f"; write {known}" if isinstance(known, torch.dtype) else ""
        raise TypeError(f"{name}: must be a torch.dtype, not {_kind(value)}{hint}")
    if value not in allowed:
        raise ValueError(f"{name}: must be one of {', '.join(map(str, allowed))}, not {value}")


def integer(name: str, value: object, least: int = 0, most: int = LARGEST) -> int:
    """`value` as an int from `least` to `most`; TypeError for floats, text and the like."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: must be an integer, not {_kind(value)}") from None
    if not least <= number <= most:
        raise ValueError(f"{name}: must be {least} to {most}, not {number}")
    return number


def require_group(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a torch.distributed group or None."""
    import torch.distributed as dist

    if value is None or not dist.is_available():
        return
    # What new_group returns to a process that is not in the group has another type.
    if isinstance(value, dist.ProcessGroup) or value == dist.GroupMember.NON_GROUP_MEMBER:
        return
    hint = "; pass ncclComm_t(address)" if isinstance(value, int) else ""
    raise TypeError(f"{name}: must be a torch.distributed group, None for all processes, or an "
                    f"ncclComm_t, not {_kind(value)}{hint}")


def _kind(value: object) -> str:
    """The type of `value`, with the value itself where it is short."""
    kind = type(value).__name__
    return f"{kind} {value!r}" if isinstance(value, (str, int, float)) else kind
