"""What table.py and plot.py read: the rows of results.csv, and the physical floor."""

import csv
import dataclasses
import math
import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

import rows
from rows import OURS

HIDDEN_BYTES = 2 * 7168
TOP_K = 8
EXPERTS = 256
USUAL_SMS = "24"
ALL_SMS = "132"  # of an H100 or H200
HT_TOKENS = "4096"  # for comparing numbers of SMs and libraries

# Measured on H200s of one host: what SMs reach when they push to all peers, and one exchange of flags with all of them.
_PUSH_GBPS = 346
_SIGNALLING_US = 5


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of results.csv."""

    fields: dict[str, str]

    def __getitem__(self, column: str) -> str:
        return self.fields[column]

    def number(self, column: str) -> float | None:
        return float(self.fields[column]) if self.fields[column] else None

    def time(self, way: str, operation: str) -> float | None:
        return self.number(f"{way}_{operation}")

    def times(self, way: str) -> list[float | None]:
        """Of dispatch, combine, and both."""
        return [self.time(way, operation) for operation in rows.OPERATIONS]

    def ways(self) -> list[str]:
        """How the row was timed."""
        return [way for way in rows.WAYS if any(time is not None for time in self.times(way))]

    @property
    def tokens(self) -> int:
        """Of the rank that has most."""
        return max(map(int, self["tokens"].split("/")))


def load(file: pathlib.Path = rows.FILE) -> list[Row]:
    with file.open(newline="") as lines:
        return [Row(fields) for fields in csv.DictReader(lines)]


def where(table: Iterable[Row], **equal: Any) -> list[Row]:
    """The rows whose columns have these values. `name` stands for the column `set`."""
    wanted = {"set" if column == "name" else column: str(value) for column, value in equal.items()}
    return [row for row in table if all(row[column] == value for column, value in wanted.items())]


def median(table: Iterable[Row], column: str) -> float | None:
    """Of the starts that several rows are; None without any figure."""
    known = [value for row in table if (value := row.number(column)) is not None]
    return statistics.median(known) if known else None


@dataclasses.dataclass(frozen=True)
class Floor:
    """The time of the wire alone, for uniformly random routing."""

    ranks: int
    experts: int = EXPERTS

    @property
    def ranks_per_token(self) -> float:
        """Distinct ranks among the experts of a token, the own rank included."""
        elsewhere = math.comb(self.experts - self.experts // self.ranks, TOP_K)
        return self.ranks * (1 - elsewhere / math.comb(self.experts, TOP_K))

    def wire_bytes(self, tokens: float) -> float:
        remote = self.ranks_per_token * (self.ranks - 1) / self.ranks
        return tokens * remote * HIDDEN_BYTES

    def us(self, tokens: float) -> float:
        return self.wire_bytes(tokens) / _PUSH_GBPS / 1e3 + _SIGNALLING_US
