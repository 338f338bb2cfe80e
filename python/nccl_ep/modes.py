"""The mode of a group as a type, by which type checkers tell results of low latency from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

Algorithm = Literal["ll", "ht"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # A group whose mode nobody knows needs no parameter, and takes those of either mode.
    Mode = TypeVar("Mode", bound=Algorithm, default=Algorithm, covariant=True)
else:
    from typing import TypeVar

    Mode = TypeVar("Mode", covariant=True)
