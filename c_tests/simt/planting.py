"""What planted_bugs.py changes in a copy of the kernels."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of the kernels that the run passes with."""

    file: str
    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Bug:
    """A change of the kernels, of all ranks or, where rank 0 lies, of the others."""

    name: str
    file: str
    old: str
    new: str
    run: str = "3 test_ll routing_styles"
    lie: Change | None = None  # of rank 0 alone, which the others must bear
    beside: tuple[Change, ...] = ()  # of all ranks, by which the bug shows sooner
