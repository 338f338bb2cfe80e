"""Tables of host times, of rows with scales and of several nodes."""

from collections.abc import Sequence

from markdown import number, numbers, table
from results import HT_TOKENS, USUAL_SMS, Row, median, where

_KINDS = {"bfloat16": "bfloat16", "fp8": "e4m3, float32 for 128",
          "ue8m0": "e4m3, exponents for 128", "mxfp8": "e4m3, exponents for 32 (MXFP8)",
          "nvfp4": "4 bits, scales for 16 (NVFP4)"}


def _kinds(chosen: Sequence[Row]) -> list[tuple[str, str]]:
    """Rows and who casts them, in the order of the file."""
    return list(dict.fromkeys((row["rows"], row["options"]) for row in chosen))


def _label(kind: tuple[str, str]) -> str:
    return ", ".join(filter(None, (_KINDS[kind[0]], kind[1])))


def _host(all_rows: Sequence[Row]) -> str:
    """What a call keeps its caller: median and 99th percentile."""
    lines = []
    for mode, tokens, sms in (("ll", "1", ""), ("ll", "128", ""), ("ht", HT_TOKENS, USUAL_SMS)):
        line = [f"{mode.upper()} {tokens}"]
        for ranks in ("2", "4"):
            row = where(all_rows, name="sweep", mode=mode, tokens=tokens, sms=sms, ranks=ranks, routing="scores")[0]
            for operation in ("dispatch", "combine"):
                line += numbers(row.number(f"host_{operation}{figure}") for figure in ("", "_p99"))
        lines.append(line)
    return table(("tokens", "2 GPUs: D", "p99", "C", "p99", "4 GPUs: D", "p99", "C", "p99"), lines)


def _rows_low_latency(all_rows: Sequence[Row]) -> str:
    """A line for each kind: dispatch by tokens in a graph, then the pair of the most tokens."""
    chosen = where(all_rows, name="rows", mode="ll")
    columns = [("2", tokens, "dispatch") for tokens in ("1", "8", "32", "64", "128")]
    columns += [("2", "128", "pair"), ("4", "1", "dispatch"), ("4", "128", "dispatch"), ("4", "128", "pair")]
    head = ["row", *(f"{'2 GPUs: ' if index == 0 else '4 GPUs: ' if index == 6 else ''}"
                     f"{tokens}{', D+C' if operation == 'pair' else ''}"
                     for index, (_, tokens, operation) in enumerate(columns))]
    return table(head, [
        (_label(kind), *(number(median(where(chosen, rows=kind[0], options=kind[1], ranks=ranks,
                                             tokens=tokens), f"graph_{operation}"))
                         for ranks, tokens, operation in columns)) for kind in _kinds(chosen)])


def _nodes(all_rows: Sequence[Row]) -> str:
    """The library on two nodes, and NCCL alone with the same bytes; both starts."""
    chosen = where(all_rows, name="nodes")
    columns = [(shown, way, operation) for shown, way in (("", "idle"), ("graph ", "graph"))
               for operation in ("dispatch", "combine")]
    lines = []
    for mode, tokens in (("ll", "1"), ("ll", "128"), ("ht", HT_TOKENS)):
        for library in ("NCCL alone", "this library"):
            starts = where(chosen, mode=mode, tokens=tokens, library=library)
            lines.append((f"{mode.upper()} {tokens}", library, *(
                _both(starts, f"{way}_{operation}") for _, way, operation in columns),
                _both(starts, "host_dispatch"), _both(starts, "host_combine")))
    head = ("tokens", "", *(f"{shown}{'D' if operation == 'dispatch' else 'C'}"
                            for shown, _, operation in columns), "host D", "host C")
    return table(head, lines)


def _both(starts: Sequence[Row], column: str) -> str:
    return ", ".join(numbers((row.number(column) for row in starts), 0))


TABLES = {
    "host": _host,
    "rows-ll": _rows_low_latency,
    "nodes": _nodes,
}
