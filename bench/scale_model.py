#!/usr/bin/env python3
"""Predicts dispatch and combine on several nodes from a few constants. A model, not a measurement.

Constants with their origin, and published figures of others, are in scale_model.json; the formula
in words is in docs/development/scale-model.md. --check prints runs of ep_bench beside the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import sys
from typing import Any

import data
from markdown import number, table

FILE = data.BENCH / "scale_model.json"
FABRIC = "400g"
GPUS = 8  # of a node
FP8_BYTES = data.HIDDEN_BYTES // 2 + data.HIDDEN_BYTES // 2 // 128 * 4  # a scale for 128 elements
TOKENS = {"ll": 128, "ht": data.HT_TOKENS}
NODES = (2, 4, 8, 16, 32, 64, 128)
OPERATIONS = ("dispatch", "combine")
CASES = ("value", "best", "worst")

# How high throughput is divided into passes (src/backend/cuda/ht/nodes/plan.rs): wanted passes,
# least and most bytes of one; where nodes have one GPU, and others.
PASSES_ALONE, PASSES, MOST_PASSES = (2, 16 << 20, 32 << 20), (8, 4 << 20, 16 << 20), 16
# What travels with a row, for each expert of its token: an id, a weight.
ID_BYTES, WEIGHT_BYTES = 8, 4

MARGIN = 0.10  # whole rows compete while they cost no more than this beside compacted ones

Parts = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Constants:
    """What the model knows of a machine; times in microseconds, bandwidths in GB/s per GPU."""

    nvlink_gbps: float
    signalling_us: float
    ll_start_us: float = 0
    ht_start_us: float = 0
    ht_nvlink_gbps: float = 0
    kernel_us: float = 0
    latency_us: float = 0
    next_latency_us: float = 0
    rail_gbps: float = math.inf
    peer_us: float = 0
    pass_us: float = 0

    def without_overheads(self) -> Constants:
        """The same wires with nothing else but the exchange of flags inside a node."""
        return Constants(self.nvlink_gbps, self.signalling_us, ht_nvlink_gbps=self.nvlink_gbps,
                         rail_gbps=self.rail_gbps)


@dataclasses.dataclass(frozen=True)
class Group:
    """N nodes of G GPUs with uniformly random routing. A GPU and its counterparts, one on each
    other node, make a rail; a row crosses the network on its sender's rail only."""

    nodes: int
    gpus: int = GPUS
    top_k: int = data.TOP_K
    at_least_experts: int = data.EXPERTS
    row_bytes: int = data.HIDDEN_BYTES

    def wire_us(self, rows: float, gbps: float) -> float:
        return rows * self.row_bytes / gbps / 1e3

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    @property
    def experts(self) -> int:
        """The records' number, rounded up to a whole number for each rank."""
        return self.ranks * math.ceil(self.at_least_experts / self.ranks)

    def reach(self, parts: int) -> float:
        """Probability that a token has an expert in a given one of so many equal parts."""
        elsewhere = math.comb(self.experts - self.experts // parts, self.top_k)
        return 1 - elsewhere / math.comb(self.experts, self.top_k)

    def rail_rows(self, compacted: bool) -> float:
        """Rows per token that leave on the rail: one for each other node (whole rows), or for
        each with an expert of the token (compacted)."""
        return (self.nodes - 1) * (self.reach(self.nodes) if compacted else 1)

    @property
    def nvlink_rows(self) -> float:
        """Rows that a GPU passes on inside its node, per token of a rank: its own tokens, and
        those that arrive on its rail, once to each other GPU with an expert of the token."""
        return self.nodes * (self.gpus - 1) * self.reach(self.ranks)

    @property
    def nvlink_rows_of_others(self) -> float:
        return self.nvlink_rows * (self.nodes - 1) / self.nodes

    def passes(self, tokens: int) -> int:
        """Into how many an operation of high throughput is divided."""
        token_bytes = max(1, self.nodes - 1) * self.row_bytes
        wanted, least, most = PASSES_ALONE if self.gpus == 1 else PASSES
        pass_bytes = min(max(math.ceil(tokens * token_bytes / wanted), least), most)
        return min(math.ceil(tokens / max(1, pass_bytes // token_bytes)), MOST_PASSES)


def constants(case: str = "value", fabric: str = FABRIC, **changes: float) -> Constants:
    """The constants of a fabric as predicted, at best or at worst; `changes` replace some."""
    chosen = {name: entry.get(case, entry["value"]) for name, entry in entries(fabric).items()}
    return Constants(*_limits(), **{**chosen, **changes})


def entries(fabric: str = FABRIC) -> dict[str, dict[str, Any]]:
    """Constants by name, as they stand in the file."""
    content = load()
    return {**content["node"], **content["fabrics"][fabric]}


@functools.cache
def load() -> dict[str, Any]:
    return json.loads(FILE.read_text())


@functools.cache
def _limits() -> tuple[float, float]:
    limits = data.load_records()["limits"]
    return limits["push_gbps"], limits["signalling_us"]


def predict(group: Group, mode: str, operation: str, tokens: int, machine: Constants,
            compacted: bool | None = None) -> Parts:
    """The parts of an operation's time from an idle stream; their sum is the time. As designed,
    low latency sends whole rows and high throughput compacts them."""
    if mode == "ll":
        return _low_latency(group, operation, tokens, machine, bool(compacted))
    return _high_throughput(group, operation, tokens, machine, compacted is not False)


def time_us(group: Group, mode: str, operation: str, tokens: int, machine: Constants,
            compacted: bool | None = None) -> float:
    return sum(predict(group, mode, operation, tokens, machine, compacted).values())


def _low_latency(group: Group, operation: str, tokens: int, machine: Constants,
                 compacted: bool) -> Parts:
    """The network's legs and the node's follow each other: in dispatch a kernel that packs, an
    exchange of rows and ids, a kernel; in combine a kernel, an exchange of weights, a kernel, an
    exchange of sums, a kernel."""
    parts = {"start": machine.ll_start_us, "signals": machine.signalling_us,
             "NVLink": group.wire_us(tokens * group.nvlink_rows, machine.nvlink_gbps)}
    if group.nodes == 1:
        return parts
    if operation == "dispatch":
        parts |= _network(group, tokens, machine, compacted, ID_BYTES)
        parts["kernels"] = machine.kernel_us
        return parts
    parts |= _network(group, tokens, machine, compacted, WEIGHT_BYTES)
    parts["latency"] += machine.next_latency_us
    parts["peers"] *= 2
    parts["kernels"] = 2 * machine.kernel_us
    return parts


def _network(group: Group, tokens: int, machine: Constants, compacted: bool,
             bytes_of_expert: int) -> Parts:
    """One exchange; `bytes_of_expert` travel with a row for each expert of its token."""
    rows = tokens * group.rail_rows(compacted)
    row = 1 + bytes_of_expert * group.top_k / group.row_bytes
    return {"latency": machine.latency_us, "peers": machine.peer_us * (group.nodes - 2),
            "rail": group.wire_us(rows * row, machine.rail_gbps)}


def _high_throughput(group: Group, operation: str, tokens: int, machine: Constants,
                     compacted: bool) -> Parts:
    """In passes, so that the slower of network and NVLink hides all of the other but one."""
    inside = group.wire_us(tokens * group.nvlink_rows, machine.ht_nvlink_gbps)
    parts = {"start": machine.ht_start_us, "signals": machine.signalling_us}
    if group.nodes == 1:
        return parts | {"NVLink": inside}
    dispatch = operation == "dispatch"
    parts |= _network(group, tokens, machine, compacted,
                      ID_BYTES + WEIGHT_BYTES if dispatch else 0)
    others = group.wire_us(tokens * group.nvlink_rows_of_others, machine.ht_nvlink_gbps)
    passes = group.passes(tokens)
    parts["NVLink"] = max(0, inside - parts["rail"]) + others / passes
    parts["passes"] = passes * machine.pass_us
    # Dispatch packs compacted rows, combine sums what came home.
    parts["kernels"] = machine.kernel_us if compacted or not dispatch else 0
    return parts


def floor_us(group: Group, tokens: int, machine: Constants) -> float:
    """What no design goes below: flags of a node, and the busier of a GPU's two wires."""
    rail = group.wire_us(tokens * group.rail_rows(compacted=True), machine.rail_gbps)
    nvlink = group.wire_us(tokens * group.nvlink_rows, machine.nvlink_gbps)
    return machine.signalling_us + max(rail, nvlink)


def excess(group: Group, mode: str, tokens: int, machine: Constants) -> float:
    """How much longer whole rows take than compacted ones, as a share, over both operations."""
    whole, compacted = (sum(time_us(group, mode, operation, tokens, machine, choice)
                            for operation in OPERATIONS) for choice in (False, True))
    return whole / compacted - 1


def whole_rows_until(mode: str, tokens: int, machine: Constants, gpus: int = GPUS) -> int:
    """The most nodes on which whole rows compete with compacted ones."""
    until = 1
    for nodes in NODES:
        if excess(Group(nodes, gpus), mode, tokens, machine) > MARGIN:
            break
        until = nodes
    return until


def tokens_of_latency(nodes: int, machine: Constants) -> float:
    """Tokens whose whole rows are on the wire for as long as the network's latency: with fewer,
    compacting cannot save much."""
    return machine.latency_us / Group(nodes).wire_us(nodes - 1, machine.rail_gbps)


def check_rows(run: data.Run, nodes: int, machine: Constants) -> list[list[str]]:
    """Predicted beside measured for each number of tokens of a run."""
    group = Group(nodes, run.ranks // nodes)
    rows = []
    for entry in run.results:
        row = [run.algorithm, str(nodes), str(group.gpus), str(entry["tokens"])]
        for operation in OPERATIONS:
            measured = data.value_at(entry, f"idle.{operation}.median_us")
            predicted = time_us(group, run.algorithm, operation, entry["tokens"], machine)
            ratio = None if measured is None else measured / predicted
            row += [number(predicted), number(measured), number(ratio, 2)]
        rows.append(row)
    return rows


CHECK_HEAD = ("mode", "nodes", "GPUs", "tokens", "dispatch: predicted us", "measured", "ratio",
              "combine: predicted us", "measured", "ratio")


def checked(run: data.Run) -> bool:
    """Whether the constants hold for a run: even uniform tokens, high throughput with 24 SMs."""
    return (not run.uneven and run.routing == "scores"
            and run.sms in (data.LIBRARYS_CHOICE, data.USUAL_SMS))


def _check(files: list[pathlib.Path], nodes: int | None, machine: Constants) -> int:
    rows = []
    for file in files:
        for run in data.load_runs([file], several_nodes=True):
            count = nodes or run.nodes
            if run.ranks % count != 0:
                print(f"{file}: {run.ranks} ranks are not {count} equal nodes", file=sys.stderr)
                return 1
            if checked(run):
                rows += check_rows(run, count, machine)
    print(table(CHECK_HEAD, rows) if rows else "no run that the model describes")
    return 0 if rows else 1


def _prediction(options: argparse.Namespace, machine: Constants) -> str:
    tokens = options.tokens or TOKENS[options.mode]
    head = ["nodes", "operation", "rows", "total us"]
    rows: list[list[str]] = []
    parts: Parts = {}
    row_bytes = {"dispatch": FP8_BYTES if options.fp8 else data.HIDDEN_BYTES,
                 "combine": data.HIDDEN_BYTES}
    for nodes in [options.nodes] if options.nodes else NODES:
        for operation in OPERATIONS:
            group = Group(nodes, options.gpus, row_bytes=row_bytes[operation])
            for rows_sent, compacted in (("whole", False), ("compacted", True)):
                parts = predict(group, options.mode, operation, tokens, machine, compacted)
                rows.append([str(nodes), operation, rows_sent, number(sum(parts.values())),
                             *map(number, parts.values())])
    return (f"Prediction, not a measurement: {options.mode}, {tokens} tokens of each rank, nodes "
            f"of {options.gpus} GPUs.\n\n" + table([*head, *parts], rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=list(TOKENS), default="ll")
    parser.add_argument("--tokens", type=int, help="of each rank (128, in high throughput 4096)")
    parser.add_argument("--nodes", type=int, help="(2 to 128; with --check as the file says, or 1)")
    parser.add_argument("--gpus", type=int, default=GPUS, help="of a node (8)")
    parser.add_argument("--fp8", action="store_true", help="dispatch FP8 rows with scales")
    parser.add_argument("--fabric", choices=list(load()["fabrics"]), default=FABRIC)
    parser.add_argument("--case", choices=CASES, default="value", help="of uncertain constants")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                        help="replace a constant of scale_model.json, for example rail_gbps=46")
    parser.add_argument("--check", nargs="+", type=pathlib.Path, metavar="FILE",
                        help="result files of run_sweep.py to print beside the prediction")
    options = parser.parse_args()
    changes = {name: float(value) for name, value in (each.split("=") for each in options.set)}
    if unknown := set(changes) - set(entries(options.fabric)):
        parser.error(f"no such constant: {', '.join(sorted(unknown))}")
    machine = constants(options.case, options.fabric, **changes)
    if options.check:
        return _check(options.check, options.nodes, machine)
    print(_prediction(options, machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
