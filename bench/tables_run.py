"""Tables of the one run in which all libraries were measured together."""

from __future__ import annotations

from typing import Any

import data
from markdown import number, table

# How a library was timed, in order of preference: an idle stream would add the launch.
WAYS = ("graph", "kernel", "queued")
_LIBRARIES = (data.OURS, "MSCCL++ EP", "DeepEP V2", "NCCL EP 0.1.0", "NCCL EP, first release")
# Layouts of a library that serve the same purpose as its first one.
_LAYOUTS = ("", ", rank-major", ", expanded")
# Name, mode, tokens, SMs, and what of it.
_LINES = (("low latency, 1 token: dispatch and combine", "ll", 1, None, "pair"),
          ("low latency, 128 tokens: dispatch and combine", "ll", 128, None, "pair"),
          ("high throughput, 4096 tokens, 24 SMs: dispatch", "ht", 4096, 24, "dispatch"),
          ("high throughput, 4096 tokens, 24 SMs: combine", "ht", 4096, 24, "combine"))


def low_latency(_runs: list[data.Run], records: dict[str, Any], tokens: int | None) -> str:
    """Rows of that many tokens, graphs and kernels before what an idle stream adds."""
    rows = [row for row in of_rows(records, "bf16")
            if row["algorithm"] == "ll" and row["tokens"] == tokens]
    return table(("library", "timed", "dispatch us", "combine us", "D+C us"),
                 [(_name(row), row["how"], *_times(row)) for row in rows])


def high_throughput(_runs: list[data.Run], records: dict[str, Any], _tokens: int | None) -> str:
    rows = [row for row in of_rows(records, "bf16") if row["algorithm"] == "ht"]
    return table(("library", "SMs", "timed", "dispatch us", "combine us", "D+C us"),
                 [(_name(row), str(row["sms"]), row["how"], *_times(row)) for row in rows])


def fp8(_runs: list[data.Run], records: dict[str, Any], _tokens: int | None) -> str:
    """Dispatches of rows that are cast to FP8; the pair's combine returns bfloat16."""
    return table(("library", "mode", "tokens", "SMs", "timed", "dispatch us", "D+C us"),
                 [(_name(row), row["algorithm"], str(row["tokens"]), str(row.get("sms", "-")),
                   row["how"], number(row["dispatch"]), number(row.get("pair")))
                  for row in of_rows(records, "fp8")])


def best(_runs: list[data.Run], records: dict[str, Any], _tokens: int | None) -> str:
    """Four figures of each library, in its best layout."""
    lines = [(name, *(_best(records, library, case) for library in _LIBRARIES))
             for name, *case in _LINES]
    return table(("microseconds", f"**{_LIBRARIES[0]}**", *_LIBRARIES[1:]), lines)


def _best(records: dict[str, Any], library: str, case: list[Any]) -> str:
    algorithm, tokens, sms, what = case
    found = [(WAYS.index(row["how"]), row[what]) for row in of_rows(records, "bf16")
             if row["library"] in [library + layout for layout in _LAYOUTS]
             and (row["algorithm"], row["tokens"], row.get("sms")) == (algorithm, tokens, sms)
             and row["how"] in WAYS and what in row]
    digits = 1 if found and min(found)[1] < 100 else 0
    time = number(min(found)[1] if found else None, digits)
    return f"**{time}**" if library == data.OURS else time


def of_rows(records: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [row for row in records["one_run"]["rows"] if row.get("rows", "bf16") == kind]


def _name(row: dict[str, Any]) -> str:
    return f"**{row['library']}**" if row["library"] == data.OURS else row["library"]


def _times(row: dict[str, Any]) -> tuple[str, str, str]:
    return number(row.get("dispatch")), number(row.get("combine")), number(row.get("pair"))


# By name; the number behind `runll` is that of tokens.
TABLES = {"runll": low_latency, "runht": high_throughput, "runfp": fp8, "runbest": best}
