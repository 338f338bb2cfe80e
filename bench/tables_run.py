"""Tables of the one run in which all libraries were measured together."""

from __future__ import annotations

from typing import Any

import data
from markdown import number, table


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


def of_rows(records: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [row for row in records["one_run"]["rows"] if row.get("rows", "bf16") == kind]


def _name(row: dict[str, Any]) -> str:
    return f"**{row['library']}**" if row["library"] == data.OURS else row["library"]


def _times(row: dict[str, Any]) -> tuple[str, str, str]:
    return number(row.get("dispatch")), number(row.get("combine")), number(row.get("pair"))


# By name; the number behind `runll` is that of tokens.
TABLES = {"runll": low_latency, "runht": high_throughput, "runfp": fp8}
