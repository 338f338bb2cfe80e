"""The mode of a group as a type, by which type checkers tell results of low latency from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

Algorithm = Literal["ll", "ht"]
# How the rows that low latency delivers lie: by local expert, or by source rank.
RowLayout = Literal["expert", "rank"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # A group whose mode nobody knows needs no parameter, and takes those of either mode.
    Mode = TypeVar("Mode", bound=Algorithm, default=Algorithm, covariant=True)
else:
    from typing import TypeVar

    Mode = TypeVar("Mode", covariant=True)


def checked_layout(layout: str, algorithm: str) -> bool:
    """Whether rows of a dispatch are rank-major."""
    if layout not in ("expert", "rank"):
        raise ValueError(f"layout: must be \"expert\" or \"rank\", not {layout!r}")
    if layout == "rank" and algorithm != "ll":
        raise ValueError("layout: only low latency has more than one")
    return layout == "rank"
