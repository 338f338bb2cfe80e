"""Tables of rows without copies: high throughput in memory that peers map, rank-major low latency and its views."""

from __future__ import annotations

from collections.abc import Sequence

from markdown import number, numbers, table
from results import ALL_SMS, Row, where

_TOKENS = ("1", "8", "32", "64", "128")
# How rows of low latency lie, as rows.py names it in `options`.
_LAYOUTS = (("by expert", ""), ("by expert, launched early", "launched early"), ("by rank", "rank-major"),
            ("by rank, in a view", "rank-major, view"))


def _mapped(all_rows: Sequence[Row]) -> str:
    """High throughput by SMs, plain and mapped tensors, then dispatches of forwarded FP8 rows."""
    chosen = where(all_rows, name="mapped", mode="ht")
    lines = []
    for sms in dict.fromkeys(row["sms"] for row in chosen):
        line = ["all" if sms == ALL_SMS else sms]
        for options in ("", "mapped"):
            found = where(chosen, sms=sms, options=options, rows="bfloat16")
            line += numbers(found[0].times("graph")) if found else ["-"] * 3
        for options in ("forwarded", "forwarded; mapped"):
            found = where(chosen, sms=sms, options=options, rows="fp8")
            line.append(number(found[0].time("graph", "dispatch") if found else None))
        lines.append(line)
    return table(("SMs", "plain: D", "C", "D+C", "mapped: D", "C", "D+C", "FP8, plain: D", "mapped: D"), lines)


def _layouts(all_rows: Sequence[Row]) -> str:
    """Pairs of low latency by layout, back to back and between other code."""
    chosen = where(all_rows, name="layouts", mode="ll")
    lines = []
    for name, options in _LAYOUTS:
        of = [row for row in chosen if row["options"].removesuffix("0 masked").rstrip("; ") == options]
        pairs = {row["tokens"]: row for row in of}
        for shown, way in (("", "graph"), (", cold", "cold")):
            lines.append((name + shown, *(number(pairs[tokens].time(way, "pair") if tokens in pairs else None)
                                          for tokens in _TOKENS)))
    return table(("D+C", *_TOKENS), lines)


TABLES = {"mapped": _mapped, "layouts": _layouts}
