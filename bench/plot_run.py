"""Bars of the one run in which all libraries were measured together."""

from __future__ import annotations

from typing import Any

import chart_style
import data
import svg
import tables_run

# Title, and which rows: mode, SMs, and what of them.
_PANELS = (("Low latency, 128 tokens: dispatch", "ll", None, "dispatch"),
           ("Low latency, 128 tokens: combine", "ll", None, "combine"),
           ("High throughput, 4096 tokens, 24 SMs: dispatch", "ht", 24, "dispatch"),
           ("High throughput, 4096 tokens, 24 SMs: combine", "ht", 24, "combine"))
_TOKENS = {"ll": 128, "ht": 4096}
_LABEL, _BAR, _ROW, _GAP = 200, 250, 26, 44


def draw(records: dict[str, Any]) -> str:
    width = 2 * (_LABEL + _BAR + 60) + 40
    parts = [svg.text(30, 34, "Microseconds on 2 x H200, all libraries in one run", 18,
                      extra=svg.BOLD),
             svg.text(30, 56, "hidden 7168, top-8 of 256 experts, bfloat16; shorter is better; "
                      "(kernel): without launch and copies", 12)]
    top = 84.0
    for left_panel, right_panel in (_PANELS[:2], _PANELS[2:]):
        panels = [_bars(records, panel) for panel in (left_panel, right_panel)]
        for index, (panel, bars) in enumerate(zip((left_panel, right_panel), panels)):
            parts += _panel(30 + index * (width / 2), top, panel[0], bars)
        top += 26 + _ROW * max(map(len, panels)) + _GAP
    return svg.picture(width, top - _GAP + 10, parts)


def _bars(records: dict[str, Any], panel: tuple) -> list[tuple[str, str, float]]:
    """Library, how it was timed, microseconds; the shortest first, each library once."""
    _, algorithm, sms, what = panel
    found: dict[str, tuple[int, str, float]] = {}
    for row in tables_run.of_rows(records, "bf16"):
        if (row["algorithm"], row["tokens"]) != (algorithm, _TOKENS[algorithm]):
            continue
        if row.get("sms") != sms or what not in row or row["how"] not in tables_run.WAYS:
            continue
        way = tables_run.WAYS.index(row["how"])
        if way < found.get(row["library"], (len(tables_run.WAYS), "", 0))[0]:
            found[row["library"]] = (way, row["how"], row[what])
    return sorted(((library, how, time) for library, (_, how, time) in found.items()),
                  key=lambda bar: bar[2])


def _panel(left: float, top: float, title: str, bars: list[tuple[str, str, float]]) -> list[str]:
    longest = max(time for _, _, time in bars)
    parts = [svg.text(left, top, title, 14, extra=svg.BOLD)]
    for index, (library, how, time) in enumerate(bars):
        y = top + 16 + index * _ROW
        ours = library == data.OURS
        colour = chart_style.OUR_COLOURS[0] if ours else "#9aa5b1"
        name = library if how != "kernel" else f"{library} (kernel)"
        parts.append(svg.text(left + _LABEL - 8, y + 14, name, 12, "end",
                              svg.BOLD if ours else ""))
        length = _BAR * time / longest
        parts.append(f"<rect x='{left + _LABEL:.1f}' y='{y:.1f}' width='{length:.1f}' "
                     f"height='{_ROW - 8}' rx='2' fill='{colour}'/>")
        parts.append(svg.text(left + _LABEL + length + 6, y + 14, f"{time:g}", 12,
                              extra=svg.BOLD if ours else ""))
    return parts
