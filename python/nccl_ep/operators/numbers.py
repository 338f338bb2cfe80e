"""Numbers by which operators know groups, handles and layers, which torch cannot pass to them.

The registry holds them weakly. What must outlive its program's variable, as the handle of a backward
does, is kept by a ticket: a tensor of its number, whose memory owns it.

A graph holds numbers of groups and layers, and the shapes that these give it. Compilers find graphs of
earlier processes again by what they hold, so such a number also stands for all that decides a shape.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
import zlib
from typing import Any

import torch

_NUMBERS = itertools.count(1)
_CONFIGURED = itertools.count()
# A WeakValueDictionary would cost two microseconds for each handle of high throughput.
_LIVE: dict[int, weakref.ref[Any]] = {}


def register(thing: Any) -> int:
    """A number for `thing` that no other of this process gets, until `forget`."""
    number = next(_NUMBERS)
    _LIVE[number] = weakref.ref(thing)
    return number


def register_configured(thing: Any, *configuration: Any) -> int:
    """The same, of a number that differs where the `configuration` does, also in other processes."""
    sum_of_it = zlib.crc32(repr(configuration).encode())
    # Beyond all that `register` gives, and below 2**53.
    number = (1 << 32 | sum_of_it) << 20 | next(_CONFIGURED)
    _LIVE[number] = weakref.ref(thing)
    return number


def forget(number: int) -> None:
    """Takes a number back; a second call does nothing."""
    _LIVE.pop(number, None)


def register_for_life(thing: Any, *configuration: Any) -> int:
    """A number that is taken back when `thing` is gone; with a `configuration`, one for that."""
    number = register_configured(thing, *configuration) if configuration else register(thing)
    weakref.finalize(thing, forget, number)
    return number


def find(kind: str, number: int) -> Any:
    """What has this number; RuntimeError if it is gone."""
    number = int(number)
    known = _LIVE.get(number)
    thing = None if known is None else known()
    if thing is None:
        raise RuntimeError(f"{kind}: number {number} does not exist in this process, or not any "
                           f"more; keep a {kind} open as long as compiled or exported code uses "
                           "it, and run such code in the process that traced it; hooks of saved "
                           "tensors, as of activation offloading, must leave those of the CPU as they are")
    return thing


class _Memory(ctypes.c_int64 * 1):  # type: ignore[misc]  # ctypes makes the base while it runs
    """Memory of a ticket, and what it keeps."""

    owner: Any


def ticket(owner: Any, number: int) -> torch.Tensor:
    """int64 [1] on the CPU: the number of `owner`, which lives as long as this memory does."""
    memory = _Memory(number)
    memory.owner = owner
    return torch.frombuffer(memory, dtype=torch.int64)


def of_ticket(kind: str, ticket: torch.Tensor) -> Any:
    """What a ticket, or a copy of one, stands for."""
    return find(kind, int(ticket.item()))


def new_ticket() -> torch.Tensor:
    """A ticket while code is traced."""
    return torch.empty(1, dtype=torch.int64, device="cpu")
