"""The style that the pictures of both modes share: colours and markers of each library, the floor,
the placing of panels, heading and legend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import data
import svg
from svg import Panel, Series, Style

# Okabe and Ito's palette, distinguishable with most kinds of colour blindness.
OUR_COLOURS = ("#0072b2", "#56b4e9")
OTHERS = {
    "NCCL EP, first release": Style("#d55e00", "square"),
    "NCCL EP": Style("#d55e00", "square"),
    "NCCL EP 0.1.0": Style("#e69f00", "diamond"),
    "NCCL EP 0.1.0, rank-major": Style("#e69f00", "diamond", hollow=True),
    "NCCL EP, May 2026": Style("#e69f00", "diamond"),
    "DeepEP V1": Style("#cc79a7", "down"),
    "DeepEP V2": Style("#9b4f7c", "triangle"),
    "MSCCL++ EP": Style("#009e73", "triangle"),
    "MSCCL++ EP, exact order": Style("#009e73", "down"),
}
UNKNOWN = Style("#56b4e9", "square")
FLOOR = Style("#52606d", dash="7 5", width=1.8)
HOW = {"host": "host-timed", "kernel": "kernel time", "graph": "graph replay"}

_WIDTH, _PANEL_WIDTH, _PANEL_HEIGHT, _TOP, _LEFT, _GAP = 1180, 300, 300, 96, 76, 66
_COLUMNS = 3

# A panel, the ranges of its two axes, and the label of the horizontal one.
Plan = tuple[Panel, svg.Point, svg.Point, str]


def style_of(record: dict[str, Any]) -> Style:
    style = OTHERS.get(record["library"], UNKNOWN)
    if record["how"] == "graph":
        return Style(style.colour, style.marker, style.dash, style.width, hollow=True)
    return style


def picture(title: str, detail: str, plans: Sequence[Plan]) -> str:
    """A heading, panels side by side, and one legend for all of them."""
    parts = [svg.text(_LEFT, 34, title, 18, extra=svg.BOLD),
             svg.text(_LEFT, 58, "hidden 7168, top-8 of 256 experts, bfloat16; " + detail, 12)]
    for index, (panel, x_range, y_range, x_label) in enumerate(plans):
        frame = svg.Frame(_LEFT + index * (_PANEL_WIDTH + _GAP), _TOP, _PANEL_WIDTH,
                          _PANEL_HEIGHT, x_range, y_range)
        parts += svg.draw_panel(panel, frame, x_label, "microseconds" if index == 0 else "")
    legend = _legend([plan[0] for plan in plans])
    top = _TOP + _PANEL_HEIGHT + 76
    parts += svg.draw_legend(legend, _LEFT, top, _COLUMNS, _PANEL_WIDTH + _GAP)
    rows = -(-len(legend) // _COLUMNS)
    return svg.picture(_WIDTH, top + 22 * rows + 6, parts)


def measured_on(ranks: int, runs: Sequence[data.Run]) -> str:
    """Where our runs were made, for the heading."""
    ours = next((run for run in runs if run.label == data.OURS), None)
    if ours is None:
        return "this library: not measured yet"
    return (f"this library on {ranks} x {ours.machine['gpu'] or 'no GPU'}, {ours.date[:10]}, "
            "median of the slowest rank")


def floor_name(floor: data.Floor) -> str:
    return f"floor: wire bytes at {floor.push_gbps} GB/s + {floor.signalling_us} µs"


def _legend(panels: list[Panel]) -> list[Series]:
    """Each name once, ours first, the floor last; a line if any panel draws it as a line."""
    found: dict[str, Series] = {}
    for panel in panels:
        for series in panel.series:
            if len(series.points) > len(found.get(series.name, Series("", FLOOR, ())).points):
                found[series.name] = series
    order = sorted(found.values(), key=lambda series: (
        not series.name.startswith(data.OURS), series.name.startswith("floor")))
    return order
