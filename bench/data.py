"""What plot.py and table.py read: our results, the records of others, and the physical floor.

A result file holds runs of ep_bench. Among runs with the same label, mode, ranks, routing and SMs,
the one with the most numbers of tokens is shown, then the latest; runs with uneven tokens are
compared among themselves. Not shown: other configurations than that of the records, times of the
CPU stand-ins, which mean nothing, and entries whose validation found wrong data. Runs on several
nodes are for the scale model alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
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
_MASKED = {"ll": 10, "ht": 0}  # ids per rank, as in the reference's program
# The routings that are shown.
_ROUTINGS = {"ll": ("scores",), "ht": ("scores", "zipf")}
_SMS_OF_CHANNEL = 2

USUAL_SMS = "24"
ALL_SMS = "all"
LIBRARYS_CHOICE = "auto"
HT_TOKENS = 4096  # for comparing numbers of SMs and libraries


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of ep_bench on some ranks: an entry for each item of its sweep."""

    label: str
    date: str
    command: str
    machine: dict[str, Any]
    config: dict[str, Any]
    results: list[dict[str, Any]]

    @property
    def algorithm(self) -> str:
        return self.config["algorithm"]

    @property
    def ranks(self) -> int:
        return self.config["ranks"]

    @property
    def nodes(self) -> int:
        """Nodes of the ranks. A file without it has one."""
        return self.config.get("nodes") or 1

    @property
    def routing(self) -> str:
        """`scores`, or `zipf` with its exponent. A file without it has random scores."""
        name = self.config.get("routing", "scores")
        return f"{name}:{self.config['zipf_exponent']:g}" if name == "zipf" else name

    @property
    def sms(self) -> str:
        """SMs that the library may use: a number, `all`, or `auto` for its own choice."""
        channels = self.config.get("channels")
        if channels is None:
            return LIBRARYS_CHOICE
        # A channel has two SMs; an odd SM stays unused.
        most = self.machine["multiprocessors"] // _SMS_OF_CHANNEL
        return ALL_SMS if channels >= most else str(_SMS_OF_CHANNEL * channels)

    @property
    def sm_count(self) -> int | None:
        """`sms` as a number; None for the library's own choice."""
        if self.sms == LIBRARYS_CHOICE:
            return None
        return self.machine["multiprocessors"] if self.sms == ALL_SMS else int(self.sms)

    @property
    def uneven(self) -> bool:
        """Whether ranks have different numbers of tokens in some entry."""
        return any(len(set(tokens_by_rank(entry))) > 1 for entry in self.results)

    @property
    def key(self) -> tuple[str, str, int, str, str, bool, int]:
        return (self.label, self.algorithm, self.ranks, self.routing, self.sms, self.uneven,
                self.nodes)

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(tokens, value) for each entry that has the metric."""
        found = [(entry["tokens"], value_at(entry, metric)) for entry in self.results]
        return [(tokens, value) for tokens, value in found if value is not None]

    def value(self, tokens: int, metric: str) -> float | None:
        return dict(self.series(metric)).get(tokens)


def tokens_by_rank(entry: dict[str, Any]) -> list[int]:
    """Tokens of each rank; files from before uneven tokens have one number for all."""
    return entry.get("tokens_by_rank") or [entry["tokens"]]


def tokens_name(entry: dict[str, Any]) -> str:
    """As an item of ep_bench --sweep, where the last number applies to all further ranks."""
    numbers = list(tokens_by_rank(entry))
    while len(numbers) > 1 and numbers[-2] == numbers[-1]:
        numbers.pop()
    return "/".join(map(str, numbers))


def value_at(entry: dict[str, Any], metric: str) -> Any:
    """The value at a path like `idle.dispatch.median_us`; None if some part of it is missing."""
    value: Any = entry
    for part in metric.split("."):
        if not isinstance(value, dict) or value.get(part) is None:
            return None
        value = value[part]
    return value


def load_runs(files: Sequence[pathlib.Path], *, several_nodes: bool = False) -> list[Run]:
    """One run of each kind, ordered by label, mode, ranks, routing and SMs."""
    best: dict[tuple[str, str, int, str, str, bool, int], Run] = {}
    for run in every_run(files):
        known = best.get(run.key)
        shown = _is_comparable(run) and (several_nodes or run.nodes == 1)
        if shown and (known is None or _weight(known) < _weight(run)):
            best[run.key] = run
    return [best[key] for key in sorted(best)]


def every_run(files: Iterable[pathlib.Path]) -> Iterator[Run]:
    """The runs of files, without entries whose data was wrong."""
    for file in files:
        content = json.loads(file.read_text())
        for entry in content["runs"]:
            right = [each for each in entry["results"] if not _is_wrong(each)]
            if len(right) < len(entry["results"]):
                print(f"{file.name}: entries with wrong data are left out", file=sys.stderr)
            yield Run(content["label"], entry["date"], entry["command"], entry["machine"],
                      entry["config"], right)


def _weight(run: Run) -> tuple[int, str]:
    return len(run.results), run.date


def _is_comparable(run: Run) -> bool:
    expected = {**_CONFIGURATION, "masked": _MASKED[run.algorithm]}
    return (all(run.config[name] == value for name, value in expected.items())
            and run.routing.split(":")[0] in _ROUTINGS[run.algorithm]
            and (run.algorithm == "ht" or run.sms == LIBRARYS_CHOICE)
            and (run.algorithm == "ll" or not run.uneven)
            # --max-tokens makes groups that allow more tokens than any rank has.
            and all(entry.get("max_tokens") in (None, entry["tokens"]) for entry in run.results))


def find(runs: Sequence[Run], algorithm: str, ranks: int | None, routing: str = "scores",
         sms: str | None = None, label: str = OURS, *, uneven: bool = False) -> Run | None:
    """The run with these properties; in low latency the library chooses the SMs."""
    sms = sms or (LIBRARYS_CHOICE if algorithm == "ll" else USUAL_SMS)
    key = (label, algorithm, ranks, routing, sms, uneven, 1)
    return next((run for run in runs if run.key == key), None)


def with_all_sms(runs: Sequence[Run], ranks: int | None, routing: str = "scores",
                 label: str = OURS) -> list[Run]:
    """High-throughput runs with a known number of SMs, ascending."""
    found = [run for run in runs if run.key[:4] == (label, "ht", ranks, routing)
             and run.sm_count is not None]
    return sorted(found, key=lambda run: run.sm_count or 0)


def _is_wrong(entry: dict[str, Any]) -> bool:
    return any((entry["wrong_rows"] or {}).values())


def result_files() -> list[pathlib.Path]:
    return sorted(RESULTS.glob("*.json"))


def load_records() -> dict[str, Any]:
    return json.loads((BENCH / "records.json").read_text())


def records_of(records: dict[str, Any], algorithm: str, ranks: int | None) -> list[dict[str, Any]]:
    """Figures of other libraries in a mode on this number of ranks."""
    return [record for record in records["records"]
            if record["algorithm"] == algorithm and record["ranks"] == ranks]


@dataclasses.dataclass(frozen=True)
class Floor:
    """The time of the wire alone, for uniformly random routing."""

    ranks: int
    push_gbps: float
    signalling_us: float
    experts: int = EXPERTS

    @property
    def ranks_per_token(self) -> float:
        """Distinct ranks among the experts of a token, the own rank included."""
        elsewhere = math.comb(self.experts - self.experts // self.ranks, TOP_K)
        return self.ranks * (1 - elsewhere / math.comb(self.experts, TOP_K))

    def wire_bytes(self, tokens: int) -> float:
        remote = self.ranks_per_token * (self.ranks - 1) / self.ranks
        return tokens * remote * HIDDEN_BYTES

    def wire_us(self, tokens: int) -> float:
        return self.wire_bytes(tokens) / self.push_gbps / 1e3

    def of_rows(self, rows: float) -> float:
        """The floor if the busiest GPU sends or receives this number of rows."""
        return rows * HIDDEN_BYTES / self.push_gbps / 1e3 + self.signalling_us

    def floor_us(self, tokens: int) -> float:
        return self.wire_us(tokens) + self.signalling_us


def floor_of(ranks: int, records: dict[str, Any]) -> Floor:
    limits = records["limits"]
    return Floor(ranks, limits["push_gbps"], limits["signalling_us"])
