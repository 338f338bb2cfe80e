#!/usr/bin/env python3
"""Writes the tables of the documents, so that no number in them is typed by hand.

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`, where NAME is an entry
of TABLES and an optional number, of ranks or tokens. --check changes nothing and fails if one is
out of date.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import data
import tables_ht
import tables_nodes
import tables_rows
import tables_run
import tables_scale
from markdown import NOT_YET, number, table

DOCUMENTS = (data.ROOT / "README.md", data.ROOT / "docs" / "performance.md",
             data.ROOT / "docs" / "development" / "scale-model.md")
_BLOCK = re.compile(r"(<!-- table: ([a-z]+)(?: (\d+))? -->\n).*?(<!-- end -->)", re.DOTALL)
_FLOOR_TOKENS = (1, 8, 32, 128, 1024, 4096, 16384)
_FLOOR_RANKS = (2, 4, 8)
_GRAPH_PAIR = "graph.pair.median_us"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", nargs="*", type=pathlib.Path, default=data.result_files(),
                        metavar="FILE", help="result files (all in bench/results)")
    parser.add_argument("--documents", nargs="*", type=pathlib.Path, default=DOCUMENTS,
                        metavar="FILE", help="(README.md, performance.md and scale-model.md)")
    parser.add_argument("--check", action="store_true", help="fail if the document would change")
    arguments = parser.parse_args()
    runs, records = data.load_runs(arguments.results), data.load_records()
    outdated = 0
    for document in arguments.documents:
        before = document.read_text()
        after = fill(before, runs, records)
        if arguments.check and before != after:
            print(f"{document}: tables are out of date, run bench/table.py")
            outdated = 1
        elif not arguments.check:
            document.write_text(after)
    return outdated


def fill(document: str, runs: list[data.Run], records: dict[str, Any]) -> str:
    """The document with every marked table made anew."""
    def made_anew(match: re.Match[str]) -> str:
        ranks = int(match[3]) if match[3] else None
        return match[1] + TABLES[match[2]](runs, records, ranks) + match[4]

    return _BLOCK.sub(made_anew, document)


def _machines(runs: list[data.Run], _records: dict[str, Any], _ranks: int | None) -> str:
    """Where and how each run was made."""
    if not runs:
        return f"{NOT_YET}\n"
    rows = []
    for run in runs:
        machine, config = run.machine, run.config
        nccl = machine["nccl"]
        version = f"{nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}"
        algorithm = config["algorithm"]
        mode = f"{algorithm}, {run.routing}, SMs: {run.sms}" if algorithm == "ht" else algorithm
        mode += ", uneven tokens" if run.uneven else ""
        rows.append((run.label, mode, f"{config['ranks']} x {machine['gpu']}",
                     machine["driver"] or "-", version, str(config["iterations"]), run.date[:16],
                     f"`{run.command}`"))
    return table(("library", "mode", "GPUs", "driver", "NCCL", "iterations", "date (UTC)",
                  "command"), rows)


def _targets(runs: list[data.Run], records: dict[str, Any], _ranks: int | None) -> str:
    rows = []
    for target in records["targets"]:
        value = _best(target, runs)
        measured, verdict = NOT_YET, ""
        if value is not None:
            value /= target.get("divide", 1)
            missed = value / target["at_most"] - 1
            measured = number(value)
            verdict = "met" if missed <= 0 else f"missed by {100 * missed:.1f} %"
        rows.append((target["algorithm"], target["what"], str(target["ranks"]),
                     str(target["tokens"]), f"<= {target['at_most']}", measured, verdict))
    return table(("mode", "what", "ranks", "tokens", "target", "measured", "verdict"), rows)


def _best(target: dict[str, Any], runs: list[data.Run]) -> float | None:
    """The measured value; the least of all numbers of SMs if the target leaves them open."""
    algorithm, ranks = target["algorithm"], target["ranks"]
    if target.get("sms") == "any":
        chosen = data.with_all_sms(runs, ranks)
    else:
        run = data.find(runs, algorithm, ranks, sms=target.get("sms"))
        chosen = [run] if run else []
    values = [run.value(target["tokens"], target["metric"]) for run in chosen]
    return min((value for value in values if value is not None), default=None)


def _floors(_runs: list[data.Run], records: dict[str, Any], _ranks: int | None) -> str:
    head = ["tokens of each rank"]
    floors = [data.floor_of(ranks, records) for ranks in _FLOOR_RANKS]
    for floor in floors:
        head += [f"{floor.ranks} ranks: wire MB", "wire us", "floor us"]
    rows = []
    for tokens in _FLOOR_TOKENS:
        row = [str(tokens)]
        for floor in floors:
            row += [number(floor.wire_bytes(tokens) / 1e6, 2), number(floor.wire_us(tokens)),
                    number(floor.floor_us(tokens))]
        rows.append(row)
    rows.append(["ranks per token", *sum(
        ([number(floor.ranks_per_token, 2), "", ""] for floor in floors), [])])
    return table(head, rows)


def _sweep(runs: list[data.Run], records: dict[str, Any], ranks: int | None) -> str:
    """Every number of tokens on one number of ranks, timed in every way."""
    run = data.find(runs, "ll", ranks)
    if run is None or ranks is None:
        return f"{NOT_YET}\n"
    floor = data.floor_of(ranks, records)
    columns = [f"{how}.{operation}.median_us" for how in ("idle", "queued", "graph")
               for operation in ("dispatch", "combine", "pair")]
    columns += ["reference.combine.median_us", "host_call.dispatch.median_us",
                "host_call.dispatch.p99_us", "host_call.combine.median_us",
                "host_call.combine.p99_us"]
    head = ["tokens", "idle D", "C", "D+C", "queued D", "C", "D+C", "graph D", "C", "D+C",
            "C with wait", "host D", "p99", "host C", "p99", "floor of D or C"]
    rows = []
    for entry in run.results:
        values = [number(data.value_at(entry, column), 2 if "host" in column else 1)
                  for column in columns]
        rows.append([str(entry["tokens"]), *values, number(floor.floor_us(entry["tokens"]))])
    return table(head, rows)


def _uneven(runs: list[data.Run], _records: dict[str, Any], ranks: int | None) -> str:
    """Uneven tokens, compared with the largest of them on every rank."""
    run = data.find(runs, "ll", ranks, uneven=True)
    if run is None:
        return f"{NOT_YET}\n"
    rows = []
    for entry in run.results:
        pair = data.value_at(entry, _GRAPH_PAIR)
        even = data.value_at(_even_entry(run, entry["tokens"]), _GRAPH_PAIR)
        ratio = pair / even if pair is not None and even is not None else None
        rows.append([data.tokens_name(entry), number(pair), number(ratio, 2),
                     *(number(data.value_at(entry, f"{how}.{operation}.median_us"))
                       for how in ("idle", "queued") for operation in ("dispatch", "combine"))])
    return table(("tokens by rank", "graph D+C", "of even", "idle D", "C", "queued D", "C"), rows)


def _even_entry(run: data.Run, tokens: int) -> dict[str, Any]:
    """The entry with this number of tokens on every rank; empty if the run has none."""
    return next((entry for entry in run.results if entry["tokens"] == tokens
                 and set(data.tokens_by_rank(entry)) == {tokens}), {})


def _peers(runs: list[data.Run], records: dict[str, Any], ranks: int | None) -> str:
    """Ours and the others, at the numbers of tokens with published figures."""
    rows: list[tuple[int, float, list[str]]] = []
    for run in runs:
        if run.algorithm == "ll" and run.ranks == ranks and not run.uneven:
            rows += _own_rows(run, _published_tokens(records, ranks))
    if not rows:
        rows = [(tokens, 0, [str(tokens), data.OURS, NOT_YET, "", "", ""])
                for tokens in _published_tokens(records, ranks)]
    for record in data.records_of(records, "ll", ranks):
        for point in record["points"]:
            times = [point.get(operation) for operation in ("dispatch", "combine", "pair")]
            rows.append((point["tokens"], _order(times),
                         [str(point["tokens"]), record["library"], record["how"],
                          *map(number, times)]))
    ordered = [row for _, _, row in sorted(rows, key=lambda row: row[:2])]
    return table(("tokens", "library", "timed", "dispatch us", "combine us", "D+C us"), ordered)


def _own_rows(run: data.Run, tokens: Sequence[int]) -> list[tuple[int, float, list[str]]]:
    rows = []
    name = f"**{run.label}**" if run.label == data.OURS else run.label
    for count in tokens:
        for how in ("idle", "graph"):
            times = [run.value(count, f"{how}.{operation}.median_us")
                     for operation in ("dispatch", "combine", "pair")]
            if any(time is not None for time in times):
                rows.append((count, _order(times), [str(count), name, how, *map(number, times)]))
    return rows


def _order(times: Sequence[float | None]) -> float:
    """Sort key: the time for both operations, measured together or added."""
    dispatch, combine, pair = times
    return pair if pair is not None else (dispatch or 0) + (combine or 0)


def _published_tokens(records: dict[str, Any], ranks: int | None) -> list[int]:
    return sorted({point["tokens"] for record in data.records_of(records, "ll", ranks)
                   for point in record["points"]})


TABLES: dict[str, Callable[[list[data.Run], dict[str, Any], int | None], str]] = {
    "machines": _machines,
    "targets": _targets,
    "floors": _floors,
    "sweep": _sweep,
    "uneven": _uneven,
    "peers": _peers,
    **tables_ht.TABLES,
    **tables_nodes.TABLES,
    **tables_rows.TABLES,
    **tables_run.TABLES,
    **tables_scale.TABLES,
}


if __name__ == "__main__":
    sys.exit(main())
