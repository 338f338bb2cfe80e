"""Tables of the one run in which all libraries were measured together."""

from __future__ import annotations

from collections.abc import Sequence

from markdown import number, numbers, table
from results import HT_TOKENS, OURS, USUAL_SMS, Row, median, where

# Ways by which libraries are compared, in order of preference: an idle stream would add the launch.
COMPARED = ("graph", "kernel", "queued")
_LIBRARIES = (OURS, "MSCCL++ EP", "DeepEP V2", "NCCL EP 0.1.0", "NCCL EP, first release")
# Layouts of a library that serve the same purpose as its first one.
_LAYOUTS = ("", ", rank-major", ", expanded")


def name_of(row: Row) -> str:
    return f"**{OURS}**" if row["library"] == OURS else row["library"]


def one_run(all_rows: Sequence[Row], **equal: str) -> list[Row]:
    return where(all_rows, name="one run", **{"rows": "bfloat16", **equal})


def _best_of_each(all_rows: Sequence[Row]) -> str:
    """Four figures of each library, in its best layout."""
    lines = []
    for mode, what, tokens, sms, operations in (
            ("ll", "low latency, 1 token", "1", "", ("pair",)),
            ("ll", "low latency, 128 tokens", "128", "", ("pair",)),
            ("ht", f"high throughput, {HT_TOKENS} tokens, {USUAL_SMS} SMs", HT_TOKENS, USUAL_SMS,
             ("dispatch", "combine"))):
        chosen = one_run(all_rows, mode=mode, tokens=tokens, sms=sms)
        for operation in operations:
            timed = "dispatch and combine" if operation == "pair" else operation
            lines.append((f"{what}: {timed}",
                          *(_best(chosen, library, operation) for library in _LIBRARIES)))
    return table(("microseconds", f"**{OURS}**", *_LIBRARIES[1:]), lines)


def _best(chosen: Sequence[Row], library: str, operation: str) -> str:
    found = [(COMPARED.index(way), time) for row in chosen for way in COMPARED
             if row["library"] in [library + layout for layout in _LAYOUTS]
             and (time := row.time(way, operation)) is not None]
    shown = number(min(found)[1] if found else None, 1 if found and min(found)[1] < 100 else 0)
    return f"**{shown}**" if library == OURS else shown


def _low_latency(all_rows: Sequence[Row]) -> str:
    """By library and way, with 128 tokens and with one."""
    lines: dict[tuple[str, str], dict[str, list[float | None]]] = {}
    for tokens in ("128", "1"):
        for row in one_run(all_rows, mode="ll", tokens=tokens):
            for way in row.ways():
                lines.setdefault((name_of(row), way), {})[tokens] = row.times(way)
    nothing: list[float | None] = [None] * 3
    return table(("library", "timed", "128 tokens: D", "C", "D+C", "1 token: D", "C", "D+C"),
                 [(*who, *numbers(times.get("128", nothing)), *numbers(times.get("1", nothing)))
                  for who, times in lines.items()])


def _high_throughput(all_rows: Sequence[Row]) -> str:
    return table(("library", "SMs", "timed", "dispatch", "combine", "D+C"),
                 [(name_of(row), row["sms"], way, *numbers(row.times(way)))
                  for row in one_run(all_rows, mode="ht") for way in row.ways()])


def _fp8(all_rows: Sequence[Row]) -> str:
    """Dispatches that cast to FP8; the pair's combine returns bfloat16."""
    columns = (("1", "", "dispatch"), ("128", "", "dispatch"), ("128", "", "pair"),
               (HT_TOKENS, USUAL_SMS, "dispatch"), (HT_TOKENS, "64", "dispatch"))
    chosen = one_run(all_rows, rows="fp8")
    lines = []
    for library, way in dict.fromkeys((row["library"], row.ways()[0]) for row in chosen):
        lines.append((library, way, *(
            number(median(where(chosen, library=library, tokens=tokens, sms=sms),
                          f"{way}_{operation}")) for tokens, sms, operation in columns)))
    return table(("library", "timed", "LL 1 token", "LL 128", "LL 128, D+C",
                  f"HT {USUAL_SMS} SMs", "HT 64 SMs"), lines)


# By name.
TABLES = {"run-best": _best_of_each, "run-ll": _low_latency, "run-ht": _high_throughput,
          "run-fp8": _fp8}
