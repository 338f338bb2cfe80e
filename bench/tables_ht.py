"""Tables of high throughput: over tokens, over SMs, skewed experts, other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import data
from markdown import NOT_YET, number, table

_OPERATIONS = ("dispatch", "combine", "pair")
_TIMES = ([f"idle.{operation}.median_us" for operation in _OPERATIONS]
          + ["graph.dispatch.median_us", "graph.combine.median_us"])
_WIRE = ["gbps.dispatch.wire", "gbps.combine.wire"]
_HEAD = ["idle D", "C", "D+C", "graph D", "C", "wire GB/s D", "C"]
_MIB = 1 << 20


def _values(entry: dict[str, Any] | None) -> list[str]:
    """The columns of _HEAD."""
    if entry is None:
        return ["-"] * len(_HEAD)
    return [*(number(data.value_at(entry, column)) for column in _TIMES),
            *(number(data.value_at(entry, column), 0) for column in _WIRE)]


def _entry(run: data.Run | None, tokens: int) -> dict[str, Any] | None:
    entries = run.results if run else []
    return next((entry for entry in entries if entry["tokens"] == tokens), None)


def _sweep(runs: list[data.Run], records: dict[str, Any], ranks: int | None) -> str:
    """Every number of tokens, with 24 SMs and with all."""
    chosen = [data.find(runs, "ht", ranks, sms=sms) for sms in (data.USUAL_SMS, data.ALL_SMS)]
    if ranks is None or not any(chosen):
        return f"{NOT_YET}\n"
    head = ["tokens"]
    for name in (f"{data.USUAL_SMS} SMs", "all SMs"):
        head += [f"{name}: {_HEAD[0]}", *_HEAD[1:]]
    floor = data.floor_of(ranks, records)
    rows = []
    for tokens in sorted({entry["tokens"] for run in chosen if run for entry in run.results}):
        values = [value for run in chosen for value in _values(_entry(run, tokens))]
        rows.append([str(tokens), *values, number(floor.floor_us(tokens))])
    return table([*head, "floor of D or C"], rows)


def _budgets(runs: list[data.Run], _records: dict[str, Any], ranks: int | None) -> str:
    """One number of tokens, every number of SMs, and the blocks that were launched."""
    rows = []
    for run in data.with_all_sms(runs, ranks):
        entry = _entry(run, data.HT_TOKENS)
        if entry is not None:
            blocks = [number(data.value_at(entry, f"blocks.{operation}"), 0)
                      for operation in ("dispatch", "combine")]
            memory = number(entry["library_bytes"] / _MIB, 0)
            rows.append([str(run.sm_count), *blocks, *_values(entry), memory])
    if not rows:
        return f"{NOT_YET}\n"
    return table(["SMs", "blocks D", "C", *_HEAD, "memory MiB"], rows)


def _zipf(runs: list[data.Run], records: dict[str, Any], ranks: int | None) -> str:
    """Skewed experts beside uniform ones. The floor is that of the busiest GPU."""
    skewed = [run for run in runs if run.key[:3] == (data.OURS, "ht", ranks)
              and run.routing != "scores" and run.sms == data.USUAL_SMS]
    if ranks is None or not skewed:
        return f"{NOT_YET}\n"
    even = data.find(runs, "ht", ranks)
    floor = data.floor_of(ranks, records)
    rows = []
    for run in skewed:
        for entry in run.results:
            busiest = max(entry["wire_rows_in_max"], entry["wire_rows_out_max"])
            compared = [number(even.value(entry["tokens"], column) if even else None)
                        for column in _TIMES[:2]]
            rows.append([str(entry["tokens"]), f"{run.config['zipf_exponent']:g}",
                         number(entry["received_rows"], 0),
                         number(entry["received_imbalance"], 2), *_values(entry), *compared,
                         number(floor.of_rows(busiest))])
    return table(["tokens", "exponent", "rows of a rank", "max/mean", *_HEAD, "uniform idle D",
                  "C", "floor of D or C"], rows)


def _peers(runs: list[data.Run], records: dict[str, Any], ranks: int | None) -> str:
    """Ours and the others at one number of tokens, ordered by the time for both operations."""
    found: list[tuple[float, list[str]]] = []
    for run in runs:
        shown = run.routing == "scores" and run.sms in (data.USUAL_SMS, data.ALL_SMS)
        if run.algorithm == "ht" and run.ranks == ranks and shown:
            name = f"**{run.label}**" if run.label == data.OURS else run.label
            found += _measured(run, name)
    unmeasured = [] if found else [[data.OURS, "", NOT_YET, "", "", ""]]
    for record in data.records_of(records, "ht", ranks):
        for point in record["points"]:
            if point["tokens"] == data.HT_TOKENS:
                found.append(_row(record["library"], str(record.get("sms", "-")), record["how"],
                                  [point.get(operation) for operation in _OPERATIONS]))
    return table(("library", "SMs", "timed", "dispatch us", "combine us", "D+C us"),
                 unmeasured + [row for _, row in sorted(found)])


def _measured(run: data.Run, name: str) -> list[tuple[float, list[str]]]:
    rows = []
    for how in ("idle", "graph"):
        times = [run.value(data.HT_TOKENS, f"{how}.{operation}.median_us")
                 for operation in _OPERATIONS]
        if any(time is not None for time in times):
            rows.append(_row(name, str(run.sm_count), how, times))
    return rows


def _row(library: str, sms: str, how: str,
         times: list[float | None]) -> tuple[float, list[str]]:
    dispatch, combine, pair = times
    order = pair if pair is not None else (dispatch or 0) + (combine or 0)
    return order, [library, sms, how, *map(number, times)]


TABLES: dict[str, Callable[[list[data.Run], dict[str, Any], int | None], str]] = {
    "htsweep": _sweep,
    "htbudgets": _budgets,
    "htzipf": _zipf,
    "htpeers": _peers,
}
