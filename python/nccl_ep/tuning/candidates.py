"""The candidates: launch shapes, and the variants that rows have."""

from __future__ import annotations

import dataclasses
from typing import Literal

from nccl_ep.choices import Choice, OperationName, VariantName
from nccl_ep.modes import Algorithm
from nccl_ep.scales import CastName

OPERATIONS: dict[Algorithm, tuple[OperationName, OperationName]] = {
    "ll": ("ll_dispatch", "ll_combine"), "ht": ("ht_dispatch", "ht_combine")}

_BLOCKS = (8, 16, 24, 32, 64)
# High throughput: a block either sends or receives.
_SEND_EIGHTHS = {"ll": (8, 2, 6), "ht": (3, 4, 5)}
# A kernel that has fewer at most reduces larger numbers to that.
_THREADS = {"ll": (256, 512, 1024), "ht": (384, 768)}

Pair = tuple["Choice | None", "Choice | None"]  # of dispatch and combine


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows to measure. `layout` "rank" and "view" are of low latency, `memory` "symmetric" of high throughput."""

    cast: CastName | None = None
    layout: Literal["expert", "rank", "view"] = "expert"
    memory: Literal["plain", "symmetric"] = "plain"

    def __post_init__(self) -> None:
        for name, known in (("layout", ("expert", "rank", "view")), ("memory", ("plain", "symmetric"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: must be one of {', '.join(known)}, not {getattr(self, name)!r}")

    def exist_in(self, algorithm: Algorithm) -> bool:
        """Whether an algorithm has such."""
        return (self.memory == "plain") if algorithm == "ll" else self.layout == "expert"


def candidates(algorithm: Algorithm, multiprocessors: int, num_sms: int) -> list[Choice]:
    """Grids of up to `num_sms` blocks (0: all multiprocessors), divided three ways."""
    most = min(num_sms or multiprocessors, multiprocessors)
    found: dict[Choice, None] = {}
    for blocks in sorted({min(blocks, most) for blocks in _BLOCKS} | {most}):
        shares = [blocks * eighths // 8 for eighths in _SEND_EIGHTHS[algorithm]]
        for threads in _THREADS[algorithm]:
            for senders in shares:
                found[Choice(None, blocks, max(senders, 1), threads)] = None
    return list(found)


def tried(algorithm: Algorithm, shapes: list[Choice], rows: Rows, exact: bool) -> list[Pair]:
    """What is measured, the library's own choice first; `exact` sums if they are possible and asked for."""
    variants: list[tuple[VariantName | None, VariantName | None]] = [(None, None)]
    if algorithm == "ht" and rows.memory == "symmetric":
        variants = [("ht.ring", "ht.ring"), ("ht.direct", "ht.pull")]
    elif algorithm == "ll" and exact and rows.layout == "expert":
        variants.append((None, "ll.exact"))
    pairs: list[Pair] = [(None, None)]
    for of_dispatch, of_combine in variants:
        if of_combine is not None:
            pairs.append((Choice(of_dispatch) if of_dispatch else None, Choice(of_combine)))
        pairs += [(dataclasses.replace(shape, variant=of_dispatch), dataclasses.replace(shape, variant=of_combine))
                  for shape in shapes]
    return pairs
