"""How single operations are run: variants with names, launch shapes, and functions that choose."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from nccl_ep.arguments import integer, kind
from nccl_ep.operators.traced import is_traced, runs_now
from nccl_ep.types import ncclEpChoice_t, ncclEpQuery_t, ncclEpSelect_t

if TYPE_CHECKING:
    from nccl_ep.group import EpGroup

OperationName = Literal["ll_dispatch", "ll_combine", "ht_dispatch", "ht_combine"]
VariantName = Literal["ll.reduce", "ll.exact", "ht.ring", "ht.direct", "ht.pull"]

_OPERATIONS: tuple[OperationName, ...] = ("ll_dispatch", "ll_combine", "ht_dispatch", "ht_combine")
# Both by the numbers of C, from 1 on.
_VARIANTS: tuple[VariantName, ...] = ("ll.reduce", "ll.exact", "ht.ring", "ht.direct", "ht.pull")
_OF_OPERATION: dict[OperationName, tuple[VariantName, ...]] = {
    "ll_dispatch": (), "ll_combine": ("ll.reduce", "ll.exact"),
    "ht_dispatch": ("ht.ring", "ht.direct"), "ht_combine": ("ht.ring", "ht.pull")}


@dataclasses.dataclass(frozen=True)
class Choice:
    """A variant and a launch shape; what is None or 0 is left to the library.

    `blocks`, an SM each, of which `send_blocks` send; `threads` of a block. `in_order`: the kernel is not launched
    while the one before it on its stream runs, as kernels of LL on one node otherwise are.
    """

    variant: VariantName | None = None
    blocks: int = 0
    send_blocks: int = 0
    threads: int = 0
    in_order: bool = False

    def __post_init__(self) -> None:
        if self.variant is not None and self.variant not in _VARIANTS:
            known = ", ".join(_VARIANTS)
            raise ValueError(f"variant: must be one of {known}, not {self.variant!r}")
        for name in ("blocks", "send_blocks", "threads"):
            integer(name, getattr(self, name))

    def in_c(self) -> ncclEpChoice_t:
        """The same for C."""
        number = 0 if self.variant is None else 1 + _VARIANTS.index(self.variant)
        return ncclEpChoice_t(ctypes.sizeof(ncclEpChoice_t), number, self.blocks, self.send_blocks,
                              self.threads, self.in_order)


@dataclasses.dataclass(frozen=True)
class Query:
    """What a selector is told of an operation of this rank.

    `row_bytes` is of a row as it travels, without scales; `sms` the most that the operation may
    take, 0 on the CPU; `symmetric`, whether peers map the rows' memory.
    """

    operation: OperationName
    tokens: int
    top_k: int
    row_bytes: int
    ranks: int
    sms: int
    symmetric: bool


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to run an operation; `default` if it is the library's own in this group."""

    name: VariantName
    default: bool

    def supports(self, query: Query) -> bool:
        """Whether it is possible there, on one node."""
        if self.name == "ll.exact":
            return self.default or query.top_k <= query.ranks
        return self.name in ("ll.reduce", "ht.ring") or query.symmetric


Selector = Callable[[Query], "Choice | None"]


def variants(operation: OperationName, exact: bool) -> list[Variant]:
    """The variants of an operation, in a group whose combines are `exact` or not."""
    default = ("ll.exact" if exact else "ll.reduce", "ht.ring")
    return [Variant(name, name in default) for name in _OF_OPERATION[checked_operation(operation)]]


def checked_operation(operation: OperationName) -> OperationName:
    """`operation`; raises if it is none."""
    if operation not in _OPERATIONS:
        raise ValueError(f"operation: must be one of {', '.join(_OPERATIONS)}, not {operation!r}")
    return operation


def number_of(operation: OperationName) -> int:
    """The number of an operation in C."""
    return 1 + _OPERATIONS.index(checked_operation(operation))


def in_c(select: Selector | None) -> Any:
    """A selector as C calls it. What it raises is printed, and counts as no choice."""
    if select is None:
        return None
    if not callable(select):
        raise TypeError(f"select: must be a function of a Query, or None, not {kind(select)}")

    def call(_: Any, query: Any, choice: Any) -> int:
        told: ncclEpQuery_t = query.contents
        found = select(Query(_OPERATIONS[told.operation - 1], told.tokens, told.top_k,
                             told.row_bytes, told.ranks, told.sms, told.symmetric != 0))
        if found is None:
            return 0
        choice[0] = found.in_c()
        return 1

    return ncclEpSelect_t(call)


@contextlib.contextmanager
def chosen(group: EpGroup[Any], name: Literal["dispatch", "combine"], choice: Choice,
           tokens: Any) -> Iterator[None]:
    """Sets `choice` for an operation of the group, and afterwards what was set before."""
    if is_traced() and not runs_now(tokens):
        raise ValueError("choice: not in compiled code, where group.set_choice serves")
    operation: Any = f"{group.algorithm}_{name}"
    before = group.choices.get(operation)
    group.set_choice(operation, choice)
    try:
        yield
    finally:
        group.set_choice(operation, before)
