"""Tables of rows without copies: high throughput in memory that peers map, rank-major low latency and its views."""

from collections.abc import Sequence

from markdown import number, numbers, table
from results import ALL_SMS, Row, where

# GPUs and tokens of each rank.
_BATCHES = (*(("2", tokens) for tokens in ("1", "8", "32", "64", "128")),
            *(("4", tokens) for tokens in ("1", "8", "32", "128")))
# How rows of low latency lie, as rows.py names it in `options`.
_LAYOUTS = (("by expert", ""), ("by expert, cast to FP8", "cast inside"), ("by expert, FP8 forwarded", "forwarded"),
            ("by rank", "rank-major"), ("by rank, cast to FP8", "cast inside; rank-major"),
            ("by rank, FP8 forwarded", "forwarded; rank-major"), ("by rank, in a view", "rank-major, view"),
            ("by rank, in a view, cast to FP8", "cast inside; rank-major, view"),
            ("by rank, in a view, FP8 forwarded", "forwarded; rank-major, view"))

# Hidden size, experts and top-k of known models.
_MODELS = (("DeepSeek-V3", 7168, 256, 8), ("GLM-4.5", 5120, 160, 8), ("Llama 4 Maverick", 5120, 128, 1),
           ("Qwen3-235B-A22B", 4096, 128, 8), ("gpt-oss-120b", 2880, 128, 4), ("Qwen3-30B-A3B", 2048, 128, 8))
_MODEL_TOKENS = ("1", "8", "32", "128", "512")


def _with_gpus(columns: Sequence[tuple[str, str]]) -> list[str]:
    """Headings of columns, of which each number of GPUs names its first."""
    names = []
    before = ""
    for gpus, name in columns:
        names.append(name if gpus == before else f"{gpus} GPUs: {name}")
        before = gpus
    return names


def _mapped(all_rows: Sequence[Row]) -> str:
    """High throughput by SMs, plain and mapped tensors, then dispatches of forwarded FP8 rows."""
    chosen = where(all_rows, name="mapped", mode="ht")
    lines = []
    for sms in sorted({row["sms"] for row in chosen}, key=int):
        line = ["all" if sms == ALL_SMS else sms]
        for gpus in ("2", "4"):
            for options in ("", "mapped"):
                found = where(chosen, gpus=gpus, sms=sms, options=options, rows="bfloat16")
                line += numbers(found[0].times("graph")[:2]) if found else ["-"] * 2
            for options in ("forwarded", "forwarded; mapped"):
                found = where(chosen, gpus=gpus, sms=sms, options=options, rows="fp8")
                line.append(number(found[0].time("graph", "dispatch") if found else None))
        lines.append(line)
    columns = ("plain: D", "C", "mapped: D", "C", "FP8, plain: D", "mapped: D")
    return table(("SMs", *_with_gpus([(gpus, name) for gpus in ("2", "4") for name in columns])), lines)


def _layouts(all_rows: Sequence[Row], shown: Sequence[tuple[str, str]] = _LAYOUTS) -> str:
    """Pairs of low latency by layout, back to back and between other code."""
    chosen = where(all_rows, name="layouts", mode="ll")
    lines = []
    for name, options in shown:
        of = [row for row in chosen if row["options"].removesuffix("0 masked").rstrip("; ") == options]
        pairs = {(row["gpus"], row["tokens"]): row for row in of}
        for ending, way in (("", "graph"), (", cold", "cold")):
            line = [number(pairs[batch].time(way, "pair") if batch in pairs else None) for batch in _BATCHES]
            if set(line) != {"-"}:
                lines.append((name + ending, *line))
    return table(("D+C", *_with_gpus(_BATCHES)), lines)


def _models(all_rows: Sequence[Row]) -> str:
    """Pairs of low latency in the sizes of known models, by expert and in views."""
    chosen = where(all_rows, name="models", mode="ll")
    batches = [(options, tokens) for options in ("0 masked", "rank-major, view; 0 masked") for tokens in _MODEL_TOKENS]
    lines = []
    for name, *size in _MODELS:
        hidden, experts, top_k = map(str, size)
        of = where(chosen, hidden=hidden, experts=experts, top_k=top_k)
        line = [where(of, options=options, tokens=tokens)[0].time("graph", "pair") for options, tokens in batches]
        lines.append((name, hidden, f"{top_k} of {experts}", *numbers(line)))
    first, *others = _MODEL_TOKENS
    return table(("D+C", "hidden", "top-k", f"by expert: {first}", *others, f"views: {first}", *others), lines)


def _layouts_without_scales(all_rows: Sequence[Row]) -> str:
    return _layouts(all_rows, [layout for layout in _LAYOUTS if layout[1] in ("", "rank-major, view")])


TABLES = {"mapped": _mapped, "layouts": _layouts, "layouts-short": _layouts_without_scales,
          "models": _models}
