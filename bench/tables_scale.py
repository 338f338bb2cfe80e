"""The tables of docs/development/scale-model.md: predictions for several nodes, what they rest on,
and where they can be checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import data
import scale_model as model
import tables_nodes
from markdown import number, table
from scale_model import Group

_BORDER_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
_REFERENCE = {"ll": "NCCL EP, first release", "ht": "NCCL EP, May 2026"}
_CHECKED_TOKENS = {"ll": (1, 8, 32, 128, 512), "ht": (512, 1024, 4096, 16384)}
_MODES = {"ll": "low latency", "ht": "high throughput"}


def _constants(_runs: list[data.Run], records: dict[str, Any], _ranks: int | None) -> str:
    limits = records["limits"]
    rows = [(f"`{name}`", f"{limits[name]}", "", "measured here", what) for name, what in (
        ("push_gbps", "NVLink, all-to-all push from SMs, outgoing per GPU. `limits` of records.json"),
        ("signalling_us", "flags exchanged with all GPUs of a node. The same"))]
    for name, entry in model.entries().items():
        rows.append((f"`{name}`", f"{entry['value']:g}", f"{entry['best']:g} to {entry['worst']:g}",
                     f"{entry['kind']}, {entry['date']}", f"{entry['what']}. {entry['origin']}"))
    return table(("constant", "value", "best to worst", "kind", "what, and where from"), rows)


def _predictions(_runs: list[data.Run], _records: dict[str, Any], _ranks: int | None) -> str:
    """Every number of nodes: what is designed, and low latency with compacted rows."""
    columns = [("ll", operation, compacted) for compacted in (False, True)
               for operation in model.OPERATIONS]
    columns += [("ht", operation, True) for operation in model.OPERATIONS]
    head = ["nodes of 8 GPUs", "LL 128, whole rows: D", "C", "compacted rows: D", "C",
            "HT 4096: D", "C"]
    rows = [[str(nodes), *(_in_range(nodes, *column) for column in columns)]
            for nodes in model.NODES]
    return table(head, rows)


def _in_range(nodes: int, mode: str, operation: str, compacted: bool) -> str:
    """`value (best to worst)` in microseconds."""
    value, best, worst = (number(_time(nodes, mode, operation, case, compacted), 0)
                          for case in model.CASES)
    return f"{value} ({best} to {worst})"


def _time(nodes: int, mode: str, operation: str, case: str = "value",
          compacted: bool | None = None) -> float:
    return model.time_us(Group(nodes), mode, operation, model.TOKENS[mode],
                         model.constants(case), compacted)


def _reference(_runs: list[data.Run], _records: dict[str, Any], _ranks: int | None) -> str:
    """What is designed beside what the reference published."""
    rows = []
    for mode, library in _REFERENCE.items():
        record = next(each for each in model.load()["published"]
                      if (each["library"], each["algorithm"]) == (library, mode))
        for point in record["points"]:
            row = [f"{_MODES[mode]}, {model.TOKENS[mode]} tokens", str(point["nodes"]), library]
            for operation in model.OPERATIONS:
                predicted = _time(point["nodes"], mode, operation)
                row += [number(predicted, 0), number(point[operation], 0),
                        number(predicted / point[operation], 2)]
            rows.append(row)
    return table(("mode", "nodes", "published by", "D: predicted us", "published", "ratio",
                  "C: predicted us", "published", "ratio"), rows)


def _parts(_runs: list[data.Run], _records: dict[str, Any], _ranks: int | None) -> str:
    """What the predicted times consist of."""
    names = ("start", "signals", "latency", "peers", "rail", "NVLink", "passes", "kernels")
    rows = []
    for mode, tokens in model.TOKENS.items():
        for nodes in model.NODES[:3]:
            for operation in model.OPERATIONS:
                parts = model.predict(Group(nodes), mode, operation, tokens, model.constants())
                rows.append([f"{mode}, {tokens}", str(nodes), operation,
                             *(number(parts.get(name)) for name in names),
                             number(sum(parts.values()))])
    return table(("mode, tokens", "nodes", "operation", *names, "sum us"), rows)


def _rows(_runs: list[data.Run], _records: dict[str, Any], _ranks: int | None) -> str:
    """Rows of a token on each wire."""
    rows = []
    for nodes in model.NODES:
        group = Group(nodes)
        whole, compacted = group.rail_rows(False), group.rail_rows(True)
        rows.append([str(nodes), str(group.experts), number(group.reach(nodes), 3),
                     number(whole, 0), number(compacted, 2), _percent(whole / compacted - 1),
                     number(group.nvlink_rows, 2), str(group.passes(model.TOKENS["ht"]))])
    return table(("nodes of 8 GPUs", "experts", "a token needs a node", "whole rows",
                  "compacted rows", "more bytes", "NVLink rows", "passes of HT 4096"), rows)


def _border(_runs: list[data.Run], _records: dict[str, Any], _ranks: int | None) -> str:
    """Where whole rows stop being competitive in low latency."""
    machine = model.constants()
    head = ["tokens", "whole rows compete up to (nodes)"]
    head += [f"longer by, {nodes} nodes" for nodes in model.NODES[:5]]
    rows = []
    for tokens in _BORDER_TOKENS:
        rows.append([str(tokens), str(model.whole_rows_until("ll", tokens, machine)),
                     *(_percent(model.excess(Group(nodes), "ll", tokens, machine))
                       for nodes in model.NODES[:5])])
    rows.append(["tokens whose rows take as long as the latency", "",
                 *(number(model.tokens_of_latency(nodes, machine), 0)
                   for nodes in model.NODES[:5])])
    return table(head, rows)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _fp8(_runs: list[data.Run], _records: dict[str, Any], _ranks: int | None) -> str:
    """Low latency's dispatch of FP8 rows beside published figures of such."""
    published = [record for record in model.load()["published"]
                 if record["algorithm"] == "ll" and record["rows"] == "FP8"]
    rows = []
    for nodes in model.NODES[:5]:
        group = Group(nodes, row_bytes=model.FP8_BYTES)
        times = (model.time_us(group, "ll", "dispatch", model.TOKENS["ll"], model.constants(),
                               compacted) for compacted in (False, True))
        others = (f"{record['library']} {point['dispatch']:g}" for record in published
                  for point in record["points"] if point["nodes"] == nodes)
        rows.append([str(nodes), *(number(time, 0) for time in times), "; ".join(others)])
    return table(("nodes", "whole rows us", "compacted us", "published us"), rows)


def _node(runs: list[data.Run], _records: dict[str, Any], _ranks: int | None) -> str:
    """One node, predicted and measured."""
    rows = []
    for run in runs:
        if run.label == data.OURS and model.checked(run):
            shown = _CHECKED_TOKENS[run.algorithm]
            rows += [row for row in model.check_rows(run, 1, model.constants())
                     if int(row[3]) in shown]
    return table(model.CHECK_HEAD, rows)


def _nodes(_runs: list[data.Run], _records: dict[str, Any], _ranks: int | None) -> str:
    """Nodes that one machine plays, predicted and measured."""
    rows = [row for run in data.load_runs(tables_nodes.FILES, several_nodes=True)
            for row in model.check_rows(run, run.nodes, model.constants(fabric="loopback"))]
    return table(model.CHECK_HEAD, rows)


def _loopback(_runs: list[data.Run], _records: dict[str, Any], _ranks: int | None) -> str:
    """The network's leg alone: latency and bandwidth against exchanges over TCP."""
    machine = model.constants(fabric="loopback")
    rows = []
    for point in model.load()["exchanges"]["points"]:
        predicted = machine.latency_us + point["bytes"] / machine.rail_gbps / 1e3
        rows.append([str(point["bytes"]), number(predicted), number(point["send_recv"]),
                     number(point["send_recv"] / predicted, 2), number(point.get("all_gather"))])
    return table(("bytes to one peer", "predicted us", "send and receive", "ratio", "all-gather"),
                 rows)


def _published(_runs: list[data.Run], _records: dict[str, Any], _ranks: int | None) -> str:
    rows = []
    for record in model.load()["published"]:
        times = ["; ".join(f"{point['nodes']}: {point[operation]:g}" for point in record["points"]
                           if operation in point) for operation in model.OPERATIONS]
        rows.append([record["library"], record["algorithm"], *times, record["rows"],
                     record["fabric"], record["how"], record["source"]])
    return table(("library", "mode", "dispatch us, by nodes", "combine us", "rows in dispatch",
                  "machine", "timed", "source"), rows)


TABLES: dict[str, Callable[[list[data.Run], dict[str, Any], int | None], str]] = {
    "scaleconstants": _constants,
    "scalepredictions": _predictions,
    "scalereference": _reference,
    "scaleparts": _parts,
    "scalerows": _rows,
    "scaleborder": _border,
    "scalefp": _fp8,
    "scalenode": _node,
    "scalenodes": _nodes,
    "scaleloopback": _loopback,
    "scalepublished": _published,
}
