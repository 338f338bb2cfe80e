"""Tables of dispatches of rows with scales, beside those without."""

from __future__ import annotations

from typing import Any

import data
from markdown import NOT_YET, number, table

_FOLDER = data.RESULTS / "rows-with-scales"
_NAMES = {"bf16": "bfloat16", "fp8": "e4m3, float32 scales for 128",
          "ue8m0": "e4m3, exponent bytes for 128", "mxfp8": "e4m3, exponent bytes for 32 (MXFP8)",
          "nvfp4": "4 bits, scales for 16 (NVFP4)"}


def low_latency(_runs: list[data.Run], _records: dict[str, Any], ranks: int | None) -> str:
    """A row for each kind: dispatch by tokens in a graph, then the pair of the most tokens."""
    runs = _runs_of("ll", ranks)
    if not runs:
        return f"{NOT_YET}\n"
    tokens = sorted(set.intersection(*({entry["tokens"] for entry in run.results} for run in runs)))
    head = ["row", *(f"{each} tokens" for each in tokens), f"pair, {tokens[-1]} tokens"]
    return table(head, [[_kind(run), *(_graph(run, count, "dispatch") for count in tokens),
                         _graph(run, tokens[-1], "pair")] for run in runs])


def high_throughput(_runs: list[data.Run], _records: dict[str, Any], ranks: int | None) -> str:
    """A row for each kind: dispatch and pair in a graph, by SMs."""
    by_kind: dict[str, dict[str, list[str]]] = {}
    for run in _runs_of("ht", ranks):
        by_kind.setdefault(_kind(run), {})[run.sms] = [
            _graph(run, data.HT_TOKENS, operation) for operation in ("dispatch", "pair")]
    if not by_kind:
        return f"{NOT_YET}\n"
    all_sms = list(next(iter(by_kind.values())))
    head = ["row", *(f"{operation}, {sms} SMs" for sms in all_sms
                     for operation in ("dispatch", "pair"))]
    return table(head, [[kind, *(time for sms in all_sms for time in times[sms])]
                        for kind, times in by_kind.items()])


def _runs_of(algorithm: str, ranks: int | None) -> list[data.Run]:
    return [run for run in data.every_run(sorted(_FOLDER.glob("*.json")))
            if (run.algorithm, run.ranks) == (algorithm, ranks)]


def _kind(run: data.Run) -> str:
    dispatch = run.config["dispatch"]
    name = _NAMES.get(dispatch, dispatch)
    if dispatch == "bf16":
        return name
    if _is_cast_outside(run):
        return f"{name}, cast by a kernel before it"
    return f"{name}, {'forwarded' if run.config['forward'] else 'cast in the dispatch'}"


def _is_cast_outside(run: data.Run) -> bool:
    return run.config.get("cast") == "outside"


def _graph(run: data.Run, tokens: int, operation: str) -> str:
    """With a cast outside, what it takes with the cast."""
    place = "graph.cast" if _is_cast_outside(run) else "graph"
    return number(run.value(tokens, f"{place}.{operation}.median_us"))


TABLES = {"rowsll": low_latency, "rowsht": high_throughput}
