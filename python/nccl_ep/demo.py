"""Starts ranks, sends tokens to experts and back by low latency, and draws who sent what to whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nccl_ep import testing
from nccl_ep.requirement import require_torch

if TYPE_CHECKING:
    import torch

EXPERTS_OF_RANK, TOKENS, TOP_K, HIDDEN = 2, 16, 2, 64


class Seen(NamedTuple):
    """What one rank saw."""

    sent: list[int]  # rows by expert
    came: list[list[int]]  # rows by local expert and source rank
    misled: int  # rows that came to an expert they were not for
    error: float  # of its weighted sums at most, as a part of the largest
    device: str


def run(ranks: int | None, stand_ins: bool) -> int:
    """Prints it; 1 if something is wrong."""
    try:
        require_torch("python -m nccl_ep demo")
        if ranks is None:
            gpus = 0 if stand_ins else testing.number_of_gpus()
            ranks = min(gpus, 4) or 4
        seen = testing.run(ranks, exchange, stand_ins=stand_ins)
    except (ImportError, RuntimeError, ValueError) as error:
        if isinstance(error.__cause__, testing.InRank):
            raise
        raise SystemExit(f"demo: {error}") from None
    right = is_right(seen)
    print(picture(seen))
    print("PASSED" if right else "FAILED")
    return int(not right)


def exchange(rank: int, ranks: int) -> Seen:
    """One rank: each token says whose it is and where it goes; expert g multiplies by g + 1."""
    import torch

    from nccl_ep import EpGroup

    experts = EXPERTS_OF_RANK * ranks
    torch.manual_seed(rank)
    with EpGroup(experts, HIDDEN, max_tokens_per_rank=TOKENS, dtype=torch.float32) as group:
        weights, ids = torch.rand(TOKENS, experts, device=group.device).softmax(1).topk(TOP_K)
        tokens = torch.rand(TOKENS, HIDDEN, device=group.device)
        tokens[:, 0] = rank
        tokens[:, 1:1 + TOP_K] = ids.float()
        with group.create_handle(ids) as handle:
            received = handle.dispatch(tokens)
            mine = torch.arange(EXPERTS_OF_RANK, device=group.device) + rank * EXPERTS_OF_RANK
            output = handle.combine(received.tokens * (mine + 1).view(-1, 1, 1), weights)
        rows = [received.tokens[index, :count].cpu()
                for index, count in enumerate(received.counts.tolist())]
        wanted = tokens * (weights * (ids + 1)).sum(1, keepdim=True)
        return Seen(sent=_counts(ids.flatten(), experts),
                    came=[_counts(each[:, 0], ranks) for each in rows],
                    misled=sum(_others(expert, each) for expert, each in zip(mine.tolist(), rows)),
                    error=float((output - wanted).abs().max() / wanted.max()),
                    device=str(group.device))


def _others(expert: int, rows: torch.Tensor) -> int:
    """How many of the rows do not name this expert."""
    return int((rows[:, 1:1 + TOP_K] != expert).all(1).sum())


def _counts(numbers: torch.Tensor, length: int) -> list[int]:
    return numbers.long().bincount(minlength=length).tolist()


def is_right(seen: list[Seen]) -> bool:
    """Whether all rows that were sent have come to their experts, and sums are right."""
    came = [list(row) for row in zip(*(row for each in seen for row in each.came))]
    return (came == [each.sent for each in seen] and not any(each.misled for each in seen)
            and all(each.error < 1e-5 for each in seen))


def picture(seen: list[Seen]) -> str:
    """The rows that came, by source rank and expert, and what was checked."""
    ranks = len(seen)
    experts = [row for each in seen for row in each.came]
    where = "the CPU stand-ins" if seen[0].device == "cpu" else f"{ranks} GPUs"
    width = 4 * EXPERTS_OF_RANK
    lines = [f"{ranks} ranks on {where}; {TOKENS} tokens on each go to {TOP_K} of {len(experts)} "
             "experts and back", "",
             "rows that came |" + "|".join(f" rank {rank}".ljust(width) for rank in range(ranks))
             + "|",
             _line("to expert", list(range(len(experts)))) + "  all"]
    lines.append("-" * len(lines[-1]))
    for source in range(ranks):
        row = [came[source] for came in experts]
        lines.append(_line(f"from rank {source}", row) + f"{sum(row):5}")
    total = [sum(came) for came in experts]
    error = max(each.error for each in seen)
    return "\n".join([*lines, _line("all", total) + f"{sum(total):5}", "",
                      f"rows at an expert they were not for: {sum(each.misled for each in seen)}",
                      f"weighted sums of {ranks * TOKENS} tokens: off by at most {error:.1g} of "
                      "the largest"])


def _line(title: str, numbers: list[int]) -> str:
    cells = [f"{number or '.':>3} " if title != "to expert" else f"{number:>3} "
             for number in numbers]
    blocks = ["".join(cells[first:first + EXPERTS_OF_RANK])
              for first in range(0, len(cells), EXPERTS_OF_RANK)]
    return f"{title:15}|" + "|".join(blocks) + "|"
