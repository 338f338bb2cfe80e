"""The table of dispatches of rows with scales, beside those without."""

from __future__ import annotations

import json
from typing import Any

import data
from markdown import NOT_YET, number, table

_FOLDER = data.ROOT / "bench" / "results" / "rows-with-scales"
_NAMES = {"bf16": "bfloat16", "fp8": "e4m3, float32 scales for 128"}


def low_latency(_runs: list[data.Run], _records: dict[str, Any], ranks: int | None) -> str:
    """A row for each kind: dispatch by tokens in a graph, then the pair of the most tokens."""
    configs, points = [], []
    for file in sorted(_FOLDER.glob("*.json")):
        for run in json.loads(file.read_text())["runs"]:
            if (run["config"]["algorithm"], run["config"]["ranks"]) == ("ll", ranks):
                configs.append(run["config"])
                points.append({entry["tokens"]: entry for entry in run["results"]})
    if not points:
        return f"{NOT_YET}\n"
    tokens = sorted(set.intersection(*(set(each) for each in points)))
    head = ["row", *(f"{each} tokens" for each in tokens), f"pair, {tokens[-1]} tokens"]
    return table(head, [[_kind(config), *(_graph(each[count], "dispatch") for count in tokens),
                         _graph(each[tokens[-1]], "pair")]
                        for config, each in zip(configs, points)])


def _kind(config: dict[str, Any]) -> str:
    name = _NAMES.get(config["dispatch"], config["dispatch"])
    if config["dispatch"] == "bf16":
        return name
    return f"{name}, {'forwarded' if config['forward'] else 'cast in the dispatch'}"


def _graph(entry: dict[str, Any], operation: str) -> str:
    return number(data.value_at(entry, f"graph.{operation}.median_us"))


TABLES = {"rowsll": low_latency}
