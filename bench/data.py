"""What plot.py and table.py read: our results, the records of others, and the physical floor.

A result file holds runs of ep_bench; of several runs with the same label, mode and number of
ranks the one with the most numbers of tokens counts, and among equals the latest. Not shown are
runs of another configuration than that of the records, results of the CPU stand-ins, because their
times mean nothing, and entries whose validation found wrong data.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

BENCH = pathlib.Path(__file__).resolve().parent
ROOT = BENCH.parent
RESULTS = BENCH / "results"
OURS = "this library"

HIDDEN_BYTES = 2 * 7168
TOP_K = 8
EXPERTS = 256
_CONFIGURATION = {"hidden": HIDDEN_BYTES // 2, "top_k": TOP_K, "experts": EXPERTS,
                  "use_fp8": False, "backend": "cuda"}
_MASKED = {"ll": 10, "ht": 0}  # as the reference's program masks


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of ep_bench on some ranks: an entry for each number of tokens."""

    label: str
    date: str
    command: str
    machine: dict[str, Any]
    config: dict[str, Any]
    results: list[dict[str, Any]]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.label, self.config["algorithm"], self.config["ranks"]

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(tokens, value) for each entry that has the metric."""
        found = [(entry["tokens"], value_at(entry, metric)) for entry in self.results]
        return [(tokens, value) for tokens, value in found if value is not None]

    def value(self, tokens: int, metric: str) -> float | None:
        return dict(self.series(metric)).get(tokens)


def value_at(entry: dict[str, Any], metric: str) -> Any:
    """The value at a path like `idle.dispatch.median_us`; None if some part of it is missing."""
    value: Any = entry
    for part in metric.split("."):
        if not isinstance(value, dict) or value.get(part) is None:
            return None
        value = value[part]
    return value


def load_runs(files: Sequence[pathlib.Path]) -> list[Run]:
    """One run of each kind, ordered by label, mode and ranks."""
    best: dict[tuple[str, str, int], Run] = {}
    for file in files:
        content = json.loads(file.read_text())
        for entry in content["runs"]:
            right = [each for each in entry["results"] if not _is_wrong(each)]
            if len(right) < len(entry["results"]):
                print(f"{file.name}: entries with wrong data are left out", file=sys.stderr)
            run = Run(content["label"], entry["date"], entry["command"], entry["machine"],
                      entry["config"], right)
            known = best.get(run.key)
            if _is_comparable(run) and (known is None or _weight(known) < _weight(run)):
                best[run.key] = run
    return [best[key] for key in sorted(best)]


def _weight(run: Run) -> tuple[int, str]:
    return len(run.results), run.date


def _is_comparable(run: Run) -> bool:
    expected = {**_CONFIGURATION, "masked": _MASKED[run.config["algorithm"]]}
    return all(run.config[name] == value for name, value in expected.items())


def _is_wrong(entry: dict[str, Any]) -> bool:
    return any((entry["wrong_rows"] or {}).values())


def result_files() -> list[pathlib.Path]:
    return sorted(RESULTS.glob("*.json"))


def load_records() -> dict[str, Any]:
    return json.loads((BENCH / "records.json").read_text())


@dataclasses.dataclass(frozen=True)
class Floor:
    """What the wire alone takes for tokens that are routed uniformly at random."""

    ranks: int
    push_gbps: float
    signalling_us: float

    @property
    def ranks_per_token(self) -> float:
        """Distinct ranks among the experts of a token, the own rank included."""
        elsewhere = math.comb(EXPERTS - EXPERTS // self.ranks, TOP_K)
        return self.ranks * (1 - elsewhere / math.comb(EXPERTS, TOP_K))

    def wire_bytes(self, tokens: int) -> float:
        remote = self.ranks_per_token * (self.ranks - 1) / self.ranks
        return tokens * remote * HIDDEN_BYTES

    def wire_us(self, tokens: int) -> float:
        return self.wire_bytes(tokens) / self.push_gbps / 1e3

    def floor_us(self, tokens: int) -> float:
        return self.wire_us(tokens) + self.signalling_us


def floor_of(ranks: int, records: dict[str, Any]) -> Floor:
    limits = records["limits"]
    return Floor(ranks, limits["push_gbps"], limits["signalling_us"])
