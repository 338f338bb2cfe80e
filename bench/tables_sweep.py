"""Tables of this library over tokens on 2, 4 and 8 GPUs, and beside others."""

from collections.abc import Sequence

from markdown import number, numbers, table
from results import ALL_SMS, HT_TOKENS, OURS, USUAL_SMS, Floor, Row, where
from tables_run import name_of

_RANKS = (2, 4, 8)
_GRAPH = ("graph_dispatch", "graph_combine")


def _ours(all_rows: Sequence[Row], **equal: object) -> Row | None:
    """This library's row of the sweeps."""
    found = where(all_rows, **{"name": "sweep", "library": OURS, "routing": "scores", **equal})
    return found[0] if found else None


def _shown(row: Row | None, *columns: str) -> list[str]:
    return [number(row.number(column) if row else None) for column in columns]


def _low_latency(all_rows: Sequence[Row]) -> str:
    """Both operations in a graph, the pair also from an idle stream."""
    head = ["tokens"]
    for ranks in _RANKS:
        head += [f"{ranks} GPUs: D", "C", "D+C", "idle", "floor"]
    lines = []
    for tokens in (1, 8, 32, 64, 128, 256, 1024):
        line = [str(tokens)]
        for ranks in _RANKS:
            line += _shown(_ours(all_rows, mode="ll", ranks=ranks, tokens=tokens), *_GRAPH, "graph_pair", "idle_pair")
            line.append(number(Floor(ranks).us(tokens)))
        lines.append(line)
    return table(head, lines)


def _high_throughput(all_rows: Sequence[Row]) -> str:
    """Both operations in a graph, with 24 SMs and with all."""
    head = ["tokens"]
    for ranks in _RANKS[:2]:
        head += [f"{ranks} GPUs, {USUAL_SMS} SMs: D", "C", "all SMs: D", "C", "floor"]
    lines = []
    for tokens in (512, 1024, 4096, 16384):
        line = [str(tokens)]
        for ranks in _RANKS[:2]:
            for sms in (USUAL_SMS, ALL_SMS):
                line += _shown(_ours(all_rows, mode="ht", ranks=ranks, sms=sms, tokens=tokens), *_GRAPH)
            line.append(number(Floor(ranks).us(tokens)))
        lines.append(line)
    return table(head, lines)


def _peers(all_rows: Sequence[Row], mode: str, tokens: str) -> str:
    """This library and others in runs of their own, by the time for both operations."""
    found = []
    chosen = [row for row in where(all_rows, name="peers", mode=mode, tokens=tokens) if row["ranks"] != "2"]
    for ranks in sorted({row["ranks"] for row in chosen}):
        ours = [row for row in where(all_rows, name="sweep", mode=mode, tokens=tokens, ranks=ranks,
                                     routing="scores") if row["sms"] in ("", USUAL_SMS, ALL_SMS)]
        for row in [*where(chosen, ranks=ranks), *ours]:
            for way in ("graph", "idle") if row in ours else row.ways():
                if mode == "ht" and way == "idle":
                    continue
                times = row.times(way)
                together = times[2] or (times[0] or 0) + (times[1] or 0)
                line = (f"{ranks} x {row['card']}", name_of(row),
                        *([row["sms"] or "-"] if mode == "ht" else []), way, *numbers(times))
                found.append((int(ranks), together, line))
    head = ("GPUs", "library", *(["SMs"] if mode == "ht" else []), "timed", "D", "C", "D+C")
    return table(head, [line for _, _, line in sorted(found)])


TABLES = {
    "ll": _low_latency,
    "ht": _high_throughput,
    "peers-ll": lambda all_rows: _peers(all_rows, "ll", "128"),
    "peers-ht": lambda all_rows: _peers(all_rows, "ht", HT_TOKENS),
}
