#!/usr/bin/env python3
"""Turns files of run_sweep.py into rows of results.csv, which all tables and pictures read.

A row is one number of tokens of one run, with the medians of the slowest rank in microseconds. What may not
be shown becomes none: times of the CPU stand-ins, which mean nothing, and entries whose validation found
wrong data. Standard library only, so that the sweep runs wherever it is copied with this file.
"""

import argparse
import csv
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

BENCH = pathlib.Path(__file__).resolve().parent
ROOT = BENCH.parent
FILE = BENCH / "results.csv"
OURS = "this library"

OPERATIONS = ("dispatch", "combine", "pair")
# Ways of timing: `cold` is between other code, `waited` has a wait of the host in combine, `kernel` is a profiler's,
# of others only.
WAYS = ("idle", "queued", "graph", "cold", "waited", "kernel")
TIMES = tuple(f"{way}_{operation}" for way in WAYS for operation in OPERATIONS)
_CALLS = ("host_dispatch", "host_dispatch_p99", "host_combine", "host_combine_p99")
# Rows that the busiest rank sends to others or receives from them, and what group and handle take.
_FACTS = ("busiest_rows", "memory_mib")
COLUMNS = ("date", "gpus", "card", "nccl", "library", "set", "mode", "ranks", "nodes", "tokens",
           "hidden", "experts", "top_k", "rows", "routing", "sms", "options",
           *TIMES, *_CALLS, *_FACTS, "command")

_SMS_OF_CHANNEL = 2
_USUAL_MASKED = {"ll": 10, "ht": 0}  # ids of each rank, as in the reference's program
_MIB = 1 << 20


def tokens_name(entry: dict[str, Any]) -> str:
    """As an item of ep_bench --sweep, where the last number applies to all further ranks."""
    numbers = list(entry.get("tokens_by_rank") or [entry["tokens"]])
    while len(numbers) > 1 and numbers[-2] == numbers[-1]:
        numbers.pop()
    return "/".join(map(str, numbers))


def value_at(entry: dict[str, Any], path: str) -> Any:
    """The value at a path like `idle.dispatch.median_us`; None if some part of it is missing."""
    value: Any = entry
    for part in path.split("."):
        if not isinstance(value, dict) or value.get(part) is None:
            return None
        value = value[part]
    return value


def rows_of(content: dict[str, Any], name: str) -> Iterator[dict[str, str]]:
    """The rows of a file of run_sweep.py, which belong to the set `name`."""
    for run in content["runs"]:
        if run["config"]["backend"] != "cuda":
            print("not measured on GPUs: left out", file=sys.stderr)
            continue
        for entry in run["results"]:
            if any((entry["wrong_rows"] or {}).values()):
                print(f"{tokens_name(entry)} tokens: wrong data, left out", file=sys.stderr)
                continue
            known = {**_described(run, entry), "library": content["label"], "set": name}
            yield _complete({**known, **_times(entry, _casts_outside(run)), **_facts(entry)})
            if alone := value_at(entry, "network.nccl_alone"):
                yield _complete({**known, "library": "NCCL alone", **_times(alone, False)})


def _described(run: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    machine, config = run["machine"], run["config"]
    nccl, channels = machine["nccl"], config.get("channels")
    sms = "" if channels is None else min(_SMS_OF_CHANNEL * channels, machine["multiprocessors"])
    zipf = config.get("zipf_exponent")
    return {
        "date": run["date"][:10], "gpus": config["ranks"], "ranks": config["ranks"],
        "card": machine["gpu"].removeprefix("NVIDIA "),
        "nccl": f"{nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}",
        "mode": config["algorithm"], "nodes": config.get("nodes") or 1,
        "tokens": tokens_name(entry), "hidden": config["hidden"], "experts": config["experts"],
        "top_k": config["top_k"], "rows": _kind_of_rows(config), "sms": sms,
        "routing": config["routing"] + (f":{zipf:g}" if zipf is not None else ""),
        "options": "; ".join(_options(run, entry)), "command": run["command"],
    }


def _kind_of_rows(config: dict[str, Any]) -> str:
    kind = config.get("dispatch", "bf16")
    return config["dtype"] if kind == "bf16" else kind


def _casts_outside(run: dict[str, Any]) -> bool:
    return run["config"].get("cast") == "outside"


def _options(run: dict[str, Any], entry: dict[str, Any]) -> Iterator[str]:
    config = run["config"]
    if config.get("dispatch", "bf16") != "bf16":
        yield ("cast before" if _casts_outside(run)
               else "forwarded" if config["forward"] else "cast inside")
    if config.get("interface"):
        yield f"{config['interface']} interface"
    if config.get("layout", "").startswith("rank"):
        yield "rank-major, view" if config["layout"].endswith("view") else "rank-major"
    if config["algorithm"] == "ht" and config.get("layout") == "expert":
        yield f"expert-major, aligned to {config['alignment']}"
    if config.get("memory") == "symmetric":
        yield "mapped"
    if config["masked"] != _USUAL_MASKED[config["algorithm"]]:
        yield f"{config['masked']} masked"
    if entry.get("max_tokens") not in (None, entry["tokens"]):
        yield f"at most {entry['max_tokens']} tokens"


def _times(entry: dict[str, Any], cast_outside: bool) -> dict[str, Any]:
    """With a cast outside, dispatch and pair contain it."""
    times = {}
    for way, place in (("idle", "idle"), ("queued", "queued"), ("graph", "graph"),
                       ("cold", "cold"), ("waited", "reference")):
        for operation in OPERATIONS:
            inside = "total" if (way, operation) == ("waited", "pair") else operation
            if cast_outside and operation != "combine":
                inside = f"cast.{operation}"
            times[f"{way}_{operation}"] = value_at(entry, f"{place}.{inside}.median_us")
    for operation in OPERATIONS[:2]:
        for column, figure in (("", "median_us"), ("_p99", "p99_us")):
            times[f"host_{operation}{column}"] = value_at(entry, f"host_call.{operation}.{figure}")
    return times


def _facts(entry: dict[str, Any]) -> dict[str, Any]:
    return {"busiest_rows": max(entry["wire_rows_in_max"], entry["wire_rows_out_max"]),
            "memory_mib": entry["library_bytes"] / _MIB if "library_bytes" in entry else None}


def _complete(row: dict[str, Any]) -> dict[str, str]:
    return {column: _text(row.get(column)) for column in COLUMNS}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}".rstrip("0").rstrip(".")
    return "" if value is None else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="as run_sweep.py wrote them")
    parser.add_argument("--set", default="", metavar="NAME", dest="name",
                        help="which table shows the rows, as in the column of this name")
    parser.add_argument("--append", action="store_true", help="to results.csv; else print them")
    arguments = parser.parse_args()
    rows = [row for file in arguments.files
            for row in rows_of(json.loads(file.read_text()), arguments.name)]
    with FILE.open("a", newline="") if arguments.append else sys.stdout as output:
        writer = csv.DictWriter(output, COLUMNS, lineterminator="\n")
        if not arguments.append:
            writer.writeheader()
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
