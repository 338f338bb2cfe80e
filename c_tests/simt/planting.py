"""What planted_bugs.py changes in a copy of the kernels."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Lie:
    """A change of the kernels of rank 0 alone, which the others must bear: the run passes with it."""

    file: str
    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Setting:
    """A harmless change of the kernels of all ranks, by which a bug shows sooner: the run passes with it."""

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
    lie: Lie | None = None
    beside: tuple[Setting, ...] = ()
