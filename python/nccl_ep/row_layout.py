"""How the rows of low latency lie: by local expert or by source rank, and what that means for weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from nccl_ep.group import EpGroup

RowLayout = Literal["expert", "rank"]


def checked_layout(layout: str, algorithm: str, weighted: bool) -> bool:
    """Whether the rows of a dispatch are rank-major. Refuses weights that it must not have, or lacks."""
    if layout not in ("expert", "rank"):
        raise ValueError(f"layout: must be \"expert\" or \"rank\", not {layout!r}")
    by_rank = layout == "rank"
    if by_rank and algorithm != "ll":
        raise ValueError("layout: only low latency has more than one")
    if by_rank and not weighted:
        raise ValueError("topk_weights: needed with layout=\"rank\"")
    if algorithm == "ll" and weighted and not by_rank:
        raise ValueError("topk_weights: in low latency they belong to combine")
    return by_rank


def check_weights_of_combine(algorithm: str, by_rank: bool, weighted: bool) -> None:
    """Refuses weights that a combine must not have, or lacks."""
    low_latency = algorithm == "ll"
    weighs = low_latency and not by_rank
    if weighs != weighted:
        raise ValueError("topk_weights: " + (
            "needed in low latency" if weighs else "applied by the caller with layout=\"rank\""
            if low_latency else "combine_with_weights returns them"))


def low_latency_shape(group: EpGroup[Any], hidden: int, by_rank: bool) -> tuple[int, int, int]:
    """Of the rows that a dispatch delivers."""
    if by_rank:
        return group.world_size, group.max_tokens_per_rank, hidden
    return group.num_local_experts, group.world_size * group.max_tokens_per_rank, hidden
