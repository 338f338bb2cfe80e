"""The table of operations over several nodes, beside NCCL alone."""

from __future__ import annotations

from typing import Any

import data
from markdown import NOT_YET, number, table

FILES = sorted((data.RESULTS / "nodes").glob("*.json"))
_OPERATIONS = {"D": "dispatch", "C": "combine"}
_WHOSE = {"NCCL": "network.nccl_alone.", "library": ""}
_CALLS = ("network.nccl_alone.host_call.dispatch", "host_call.dispatch", "host_call.combine")


def nodes(_runs: list[data.Run], _records: dict[str, Any], ranks: int | None) -> str:
    """A row for each measurement: the library, and NCCL alone with the same bytes."""
    columns = [(f"{shown}{name} {whose}", f"{place}{how}.{operation}")
               for shown, how in (("", "idle"), ("graph ", "graph"))
               for name, operation in _OPERATIONS.items() for whose, place in _WHOSE.items()]
    columns += zip(("call NCCL", "call D", "call C"), _CALLS)
    entries = [(run, entry) for run in data.every_run(FILES) if run.ranks == ranks
               for entry in run.results]
    entries.sort(key=lambda each: (each[0].algorithm != "ll", each[1]["tokens"]))
    rows = [[run.algorithm, str(entry["tokens"]),
             *(number(data.value_at(entry, f"{path}.median_us"), 0) for _, path in columns)]
            for run, entry in entries]
    head = ["mode", "tokens", *(name for name, _ in columns)]
    return table(head, rows) if rows else f"{NOT_YET}\n"


TABLES = {"nodes": nodes}
