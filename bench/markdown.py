"""Tables in Markdown, and how numbers look in them."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    made = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*made, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def numbers(values: Iterable[float | None], digits: int = 1) -> list[str]:
    return [number(value, digits) for value in values]
