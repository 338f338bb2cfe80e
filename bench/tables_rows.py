"""Tables of dispatches of rows with scales beside those without, and of operations on two nodes."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import data
from markdown import NOT_YET, number, table

_WITH_SCALES = data.RESULTS / "rows-with-scales"
_ON_NODES = data.RESULTS / "nodes"
_NAMES = {"bf16": "bfloat16", "fp8": "e4m3, float32 scales for 128",
          "ue8m0": "e4m3, exponent bytes for 128", "mxfp8": "e4m3, exponent bytes for 32 (MXFP8)",
          "nvfp4": "4 bits, scales for 16 (NVFP4)"}


def low_latency(_runs: list[data.Run], _records: dict[str, Any], ranks: int | None) -> str:
    """A row for each kind: dispatch by tokens in a graph, then the pair of the most tokens."""
    runs = list(_of_files(_WITH_SCALES, "ll", ranks))
    points = [{entry["tokens"]: entry for entry in run["results"]} for run in runs]
    if not points:
        return f"{NOT_YET}\n"
    tokens = sorted(set.intersection(*(set(each) for each in points)))
    head = ["row", *(f"{each} tokens" for each in tokens), f"pair, {tokens[-1]} tokens"]
    return table(head, [[_kind(run["config"]),
                         *(_graph(run, each[count], "dispatch") for count in tokens),
                         _graph(run, each[tokens[-1]], "pair")]
                        for run, each in zip(runs, points)])


def high_throughput(_runs: list[data.Run], _records: dict[str, Any], ranks: int | None) -> str:
    """A row for each kind: dispatch and pair in a graph, by SMs."""
    by_kind: dict[str, dict[str, list[str]]] = {}
    for run in _of_files(_WITH_SCALES, "ht", ranks):
        sms = data.Run("", "", "", run["machine"], run["config"], []).sms
        times = [_graph(run, run["results"][0], operation) for operation in ("dispatch", "pair")]
        by_kind.setdefault(_kind(run["config"]), {})[sms] = times
    if not by_kind:
        return f"{NOT_YET}\n"
    all_sms = list(next(iter(by_kind.values())))
    head = ["row", *(f"{operation}, {sms} SMs" for sms in all_sms
                     for operation in ("dispatch", "pair"))]
    return table(head, [[kind, *(time for sms in all_sms for time in times[sms])]
                        for kind, times in by_kind.items()])


def on_nodes(_runs: list[data.Run], _records: dict[str, Any], ranks: int | None) -> str:
    """A row for each measurement: the library beside NCCL alone, which sends the same bytes."""
    rows = []
    for algorithm in ("ll", "ht"):
        for run in _of_files(_ON_NODES, algorithm, ranks):
            rows += [[algorithm, str(entry["tokens"]), *_beside_nccl(entry, "idle"),
                      *_beside_nccl(entry, "graph"), *_calls(entry)] for entry in run["results"]]
    rows.sort(key=lambda row: (row[0] != "ll", int(row[1])))
    head = ["mode", "tokens", *(f"{how}{operation} {whose}" for how in ("", "graph ")
                                for operation in "DC" for whose in ("NCCL", "library")),
            "call NCCL", "call D", "call C"]
    return table(head, rows) if rows else f"{NOT_YET}\n"


def _beside_nccl(entry: dict[str, Any], how: str) -> list[str]:
    return [number(data.value_at(entry, f"{place}{how}.{operation}.median_us"), 0)
            for operation in ("dispatch", "combine") for place in ("network.nccl_alone.", "")]


def _calls(entry: dict[str, Any]) -> list[str]:
    """Host time of NCCL's group call, of a dispatch and of a combine."""
    paths = ("network.nccl_alone.host_call.dispatch", "host_call.dispatch", "host_call.combine")
    return [number(data.value_at(entry, f"{path}.median_us"), 0) for path in paths]


def _of_files(folder: pathlib.Path, algorithm: str,
              ranks: int | None) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob("*.json")):
        for run in json.loads(file.read_text())["runs"]:
            if (run["config"]["algorithm"], run["config"]["ranks"]) == (algorithm, ranks):
                yield run


def _kind(config: dict[str, Any]) -> str:
    name = _NAMES.get(config["dispatch"], config["dispatch"])
    if config["dispatch"] == "bf16":
        return name
    if config.get("cast") == "outside":
        return f"{name}, cast by a kernel before it"
    return f"{name}, {'forwarded' if config['forward'] else 'cast in the dispatch'}"


def _graph(run: dict[str, Any], entry: dict[str, Any], operation: str) -> str:
    """With a cast outside, what it takes with the cast."""
    place = "graph.cast" if run["config"].get("cast") == "outside" else "graph"
    return number(data.value_at(entry, f"{place}.{operation}.median_us"))


TABLES = {"rowsll": low_latency, "rowsht": high_throughput, "nodes": on_nodes}
