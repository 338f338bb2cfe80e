"""Tables of the one run in which all libraries were measured together, in graphs."""

import datetime
from collections.abc import Sequence

from markdown import number, numbers, table
from results import ALL_SMS, HT_TOKENS, OURS, USUAL_SMS, Row, where

_TOKENS = ("1", "8", "32", "128")


def name_of(row: Row) -> str:
    return f"**{OURS}**" if row["library"] == OURS else row["library"]


def one_run(all_rows: Sequence[Row], **equal: str) -> list[Row]:
    return where(all_rows, name="one run", **{"rows": "bfloat16", **equal})


def today(all_rows: Sequence[Row]) -> list[tuple[str, list[Row], Row]]:
    """This library's rows since: its name, low latency by tokens, and high throughput."""
    ways = ((OURS, "0 masked", ""), (f"{OURS}, without copies", "rank-major, view; 0 masked", "mapped"))
    return [(name, where(all_rows, name="layouts-h100", gpus=2, rows="bfloat16", options=options),
             where(all_rows, name="mapped-h100", gpus=2, rows="bfloat16", options=memory, sms=USUAL_SMS)[-1])
            for name, options, memory in ways]


def _all_libraries(all_rows: Sequence[Row]) -> str:
    """Low latency by tokens of each rank, then high throughput; each layout of a library is a line.

    The first are this library's since that run, on other GPUs of the kind.
    """
    chosen = one_run(all_rows)
    lines = [(f"**{name}**, {_day(high)}", *_pairs(low), *numbers(high.times("graph"), 0))
             for name, low, high in today(all_rows)]
    for library in dict.fromkeys(row["library"] for row in chosen):
        low = where(chosen, library=library, mode="ll")
        high = where(chosen, library=library, mode="ht", sms=USUAL_SMS)
        name = f"**{OURS}**, {_day(low[0])}" if library == OURS else library
        lines.append((name, *_pairs(low), *(numbers(high[0].times("graph"), 0) if high else ["-"] * 3)))
    return table(("us", *(f"LL {tokens}" for tokens in _TOKENS),
                  f"HT {HT_TOKENS}, {USUAL_SMS} SMs: D", "C", "D+C"), lines)


def _day(row: Row) -> str:
    return f"{datetime.date.fromisoformat(row['date']):%-d %B}"


def _pairs(chosen: Sequence[Row], tokens: Sequence[str] = _TOKENS) -> list[str]:
    """Of dispatch and combine."""
    found = {row["tokens"]: row.time("graph", "pair") for row in chosen}
    return [number(found.get(each)) for each in tokens]


def _low_latency(all_rows: Sequence[Row]) -> str:
    """Both operations apart."""
    chosen = one_run(all_rows, mode="ll")
    lines = []
    for library in dict.fromkeys(row["library"] for row in chosen):
        of = where(chosen, library=library)
        apart = where(of, tokens="128")[0].times("graph")[:2]
        if any(apart):
            lines.append((name_of(of[0]), *numbers(apart)))
    return table(("us", "128 tokens: D", "C"), lines)


def _high_throughput(all_rows: Sequence[Row]) -> str:
    return table(("library", "SMs", "dispatch", "combine", "D+C"),
                 [(name_of(row), row["sms"], *numbers(row.times("graph"), 0))
                  for row in one_run(all_rows, mode="ht")])


def _fp8(all_rows: Sequence[Row]) -> str:
    """Dispatches of rows in FP8; the pair's combine returns bfloat16."""
    chosen = one_run(all_rows, rows="fp8")
    lines = []
    for library, options in dict.fromkeys((row["library"], row["options"]) for row in chosen):
        of = where(chosen, library=library, options=options)
        high = {row["sms"]: row.time("graph", "dispatch") for row in where(of, mode="ht")}
        lines.append((name_of(of[0]), options, *_pairs(where(of, mode="ll"), tokens=("1", "128")),
                      *(number(high.get(sms), 0) for sms in ("16", USUAL_SMS, "64", ALL_SMS))))
    return table(("us", "rows", "LL 1, D+C", "LL 128, D+C", "HT 16 SMs: D", USUAL_SMS, "64", "all"), lines)


# By name.
TABLES = {"run-all": _all_libraries, "run-ll": _low_latency, "run-ht": _high_throughput, "run-fp8": _fp8}
