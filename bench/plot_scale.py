"""Pictures of the scale model: predicted times over the number of nodes, and published figures of
others as marks. They show no measurement of this library, and say so.
"""

from __future__ import annotations

from typing import Any

import chart_style
import scale_model as model
import svg
from scale_model import Group
from svg import Frame, Panel, Series, Style

_NODES = (1.8, 150.0)
_Y_RANGES = {"ll": (32.0, 8192.0), "ht": (512.0, 32768.0)}
_TITLES = {"ll": "low latency, 128 tokens of each rank",
           "ht": "high throughput, 4096 tokens of each rank"}
_WHOLE = Style(chart_style.OUR_COLOURS[0], "circle", "7 4", 3, hollow=True)
_COMPACTED = Style(chart_style.OUR_COLOURS[1], "circle", "2 5", 2.4, hollow=True)
_OTHERS = {
    "pplx-garden": Style("#009e73", "triangle"),
    "pplx-garden on EFA": Style("#009e73", "down"),
    "UCCL-EP on EFA": Style("#7b6d00", "square"),
    "MORI, MI300X": Style("#8c564b", "diamond"),
    "MORI, MI355X": Style("#8c564b", "square"),
    "Hybrid-EP": Style("#117733", "diamond"),
    "NIXL": Style("#444444", "triangle"),
    "NCCL EP, March 2026": Style("#e69f00", "square"),
    "DeepEP V1 on GIN": Style("#cc79a7", "triangle"),
}
_WIDTH, _PANEL_WIDTH, _PANEL_HEIGHT, _TOP, _LEFT, _GAP = 1180, 500, 480, 96, 76, 66
_LABEL, _LINE = 9.5, 10.5  # size of the marks' labels, and their least distance
_HALO = "stroke='#ffffff' stroke-width='2.5' paint-order='stroke'"  # lines stay behind labels


def draw_all() -> dict[str, str]:
    """Pictures by file name."""
    return {f"scale-{mode}.svg": _draw(mode) for mode in model.TOKENS}


def _draw(mode: str) -> str:
    parts = [svg.text(_LEFT, 34, f"PREDICTION of a model, not a measurement: {_TITLES[mode]}", 18,
                      extra=svg.BOLD), svg.text(_LEFT, 58, _detail(), 12)]
    legend: list[Series] = []
    for index, operation in enumerate(model.OPERATIONS):
        frame = Frame(_LEFT + index * (_PANEL_WIDTH + _GAP), _TOP, _PANEL_WIDTH, _PANEL_HEIGHT,
                      _NODES, _Y_RANGES[mode])
        legend = _predicted(mode, operation)
        marks = _published(mode, operation)
        panel = Panel(operation.capitalize(), (*legend, *(series for series, _ in marks)))
        parts += svg.draw_panel(panel, frame, f"nodes of {model.GPUS} GPUs",
                                "microseconds" if index == 0 else "")
        parts += _labels(marks, frame)
    top = _TOP + _PANEL_HEIGHT + 72
    parts += svg.draw_legend(legend, _LEFT, top, 1, _WIDTH)
    note = ("Labelled marks: published figures of other libraries, on their machines, timed in "
            "their ways; hollow: FP8 rows, about half the bytes.")
    parts.append(svg.text(_LEFT, top + 22 * len(legend) + 4, note, 12))
    return svg.picture(_WIDTH, top + 22 * len(legend) + 20, parts)


def _detail() -> str:
    machine = model.constants()
    return ("hidden 7168, top-8 of 256 experts (from 64 nodes on one on each GPU), bfloat16; "
            f"{machine.rail_gbps:g} GB/s rails, {machine.latency_us:g} µs network latency, "
            f"{machine.nvlink_gbps:g} GB/s NVLink")


def _predicted(mode: str, operation: str) -> list[Series]:
    """The floor, then ours: whole and compacted rows. What exceeds the picture is cut."""
    machine, tokens, most = model.constants(), model.TOKENS[mode], _Y_RANGES[mode][1]
    names = {False: "whole rows", True: "compacted rows"}
    names[mode == "ht"] += ", as designed"
    floor = tuple((nodes, model.floor_us(Group(nodes), tokens, machine)) for nodes in model.NODES)
    series = [Series("floor: flags of a node + the busier of rail and NVLink", chart_style.FLOOR,
                     floor)]
    for compacted, style in ((False, _WHOLE), (True, _COMPACTED)):
        times = ((nodes, model.time_us(Group(nodes), mode, operation, tokens, machine, compacted))
                 for nodes in model.NODES)
        series.append(Series(f"prediction: this library, {names[compacted]}", style,
                             tuple(point for point in times if point[1] < most)))
    return series


def _published(mode: str, operation: str) -> list[tuple[Series, str]]:
    """Marks and their labels. FP8 counts in dispatch only: what returns is bfloat16."""
    marks = []
    for record in model.load()["published"]:
        if record["algorithm"] != mode or "short" not in record:
            continue
        points = tuple((point["nodes"], point[operation]) for point in record["points"]
                       if operation in point)
        style = _OTHERS.get(record["library"]) or chart_style.style_of(record)
        if record["rows"] == "FP8" and operation == "dispatch":
            style = Style(style.colour, style.marker, hollow=True)
        marks.append((Series(record["library"], style, points, joined=False), record["short"]))
    return marks


def _labels(marks: list[tuple[Series, str]], frame: Frame) -> list[str]:
    """A label to the right of each mark; where marks are close, labels make way up and down."""
    columns: dict[float, list[tuple[float, str, str]]] = {}
    for series, label in marks:
        for nodes, time in series.points:
            entry = (frame.y(time), label, series.style.colour)
            columns.setdefault(frame.x(nodes), []).append(entry)
    parts = []
    for x, entries in columns.items():
        entries.sort()
        places = spread([y for y, _, _ in entries], _LINE)
        for y, (_, label, colour) in zip(places, entries):
            parts.append(f"<text x='{x + 8:.1f}' y='{y + 3.5:.1f}' font-size='{_LABEL}' "
                         f"fill='{colour}' {_HALO} {svg.FONT}>{svg.escape(label)}</text>")
    return parts


def spread(wanted: list[float], distance: float) -> list[float]:
    """Places with at least this distance, moved from the wanted ones (ascending) as little as the
    sum of squares allows: those too close form a block around their mean."""
    blocks: list[tuple[float, int]] = []  # first place and number
    for place in wanted:
        blocks.append((place, 1))
        while len(blocks) > 1 and blocks[-2][0] + blocks[-2][1] * distance > blocks[-1][0]:
            (low, many), (first, count) = blocks.pop(), blocks.pop()
            total = first * count + (low - count * distance) * many
            blocks.append((total / (count + many), count + many))
    return [first + index * distance for first, count in blocks for index in range(count)]
