#!/usr/bin/env python3
"""Draws docs/plots/*.svg: latency over tokens, ours beside the records of others and the floor.

One picture for each number of ranks: dispatch, combine, and both together. Others' times are those
of records.json; a point without a line is a single published or measured figure.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

import data
import svg
from svg import Panel, Series, Style

PLOTS = data.ROOT / "docs" / "plots"
_TOKENS = (1, 1024)
_PANELS = (("Dispatch", "dispatch"), ("Combine", "combine"), ("Dispatch and combine", "pair"))

# Okabe and Ito's colours, which most kinds of colour blindness keep apart.
_OURS = {"idle": Style("#0072b2", "circle", width=3),
         "graph": Style("#0072b2", "circle", "2 5", 2.4, hollow=True)}
_OTHERS = {
    "NCCL EP, first release": Style("#d55e00", "square"),
    "NCCL EP 0.1.0": Style("#e69f00", "diamond"),
    "NCCL EP 0.1.0, rank-major": Style("#e69f00", "diamond", hollow=True),
    "NCCL EP, May 2026": Style("#e69f00", "diamond"),
    "DeepEP V1": Style("#cc79a7", "down"),
    "DeepEP V2": Style("#9b4f7c", "triangle"),
    "MSCCL++ EP": Style("#009e73", "triangle"),
    "MSCCL++ EP, exact order": Style("#009e73", "down"),
}
_UNKNOWN = Style("#56b4e9", "square")
_FLOOR = Style("#52606d", dash="7 5", width=1.8)

_WIDTH, _PANEL_WIDTH, _PANEL_HEIGHT, _TOP, _LEFT, _GAP = 1180, 300, 300, 96, 76, 66
_HOW = {"host": "host-timed", "kernel": "kernel time", "graph": "graph replay"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", nargs="*", type=pathlib.Path, default=data.result_files(),
                        metavar="FILE", help="result files (all in bench/results)")
    parser.add_argument("--out", type=pathlib.Path, default=PLOTS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    drawn = draw_all(data.load_runs(arguments.results), data.load_records())
    for name, picture in drawn.items():
        (arguments.out / name).write_text(picture)
        print(arguments.out / name)
    return 0


def draw_all(runs: list[data.Run], records: dict[str, Any]) -> dict[str, str]:
    """File names and pictures: one for each number of ranks that anybody measured."""
    runs = [run for run in runs if run.config["algorithm"] == "ll"]
    known = {record["ranks"] for record in records["records"] if record["algorithm"] == "ll"}
    return {f"ll-{ranks}-ranks.svg":
            draw(ranks, [run for run in runs if run.config["ranks"] == ranks], records)
            for ranks in sorted(known | {run.config["ranks"] for run in runs})}


def draw(ranks: int, runs: list[data.Run], records: dict[str, Any]) -> str:
    """The picture for one number of ranks."""
    panels = [Panel(title, tuple(_series(ranks, operation, runs, records)))
              for title, operation in _PANELS]
    values = [y for panel in panels for series in panel.series for _, y in series.points]
    y_range = (4.0, max(256.0, 1.15 * max(values)))
    parts = _heading(ranks, runs)
    for index, panel in enumerate(panels):
        frame = svg.Frame(_LEFT + index * (_PANEL_WIDTH + _GAP), _TOP, _PANEL_WIDTH,
                          _PANEL_HEIGHT, _TOKENS, y_range)
        parts += svg.draw_panel(panel, frame, "tokens of each rank",
                                "microseconds" if index == 0 else "")
    legend = _legend(panels)
    top = _TOP + _PANEL_HEIGHT + 76
    parts += svg.draw_legend(legend, _LEFT, top, 3, _PANEL_WIDTH + _GAP)
    rows = -(-len(legend) // 3)
    return svg.picture(_WIDTH, top + 22 * rows + 6, parts)


def _heading(ranks: int, runs: list[data.Run]) -> list[str]:
    ours = [run for run in runs if run.label == data.OURS]
    title = f"Low latency on {ranks} GPUs: latency over tokens"
    if ours:
        machine = ours[0].machine
        detail = (f"this library on {ranks} x {machine['gpu'] or 'no GPU'}, {ours[0].date[:10]}, "
                  "median of the slowest rank")
    else:
        detail = "this library: not measured yet"
    return [svg.text(_LEFT, 34, title, 18, extra=svg.BOLD),
            svg.text(_LEFT, 58, "hidden 7168, top-8 of 256 experts, bfloat16; " + detail, 12)]


def _series(ranks: int, operation: str, runs: list[data.Run],
            records: dict[str, Any]) -> list[Series]:
    """The floor, ours, and on top the others, many of which are single points."""
    series = [_floor(ranks, operation, records)]
    for run in runs:
        series += _measured(run, operation)
    for record in records["records"]:
        if record["algorithm"] == "ll" and record["ranks"] == ranks:
            points = tuple((point["tokens"], point[operation])
                           for point in record["points"] if operation in point)
            name = f"{record['library']} ({_HOW[record['how']]})"
            series.append(Series(name, _style_of(record), points))
    return [entry for entry in series if entry.points]


def _floor(ranks: int, operation: str, records: dict[str, Any]) -> Series:
    floor = data.floor_of(ranks, records)
    times = 2 if operation == "pair" else 1
    tokens = [2 ** (step / 4) for step in range(0, 41)]
    name = f"floor: wire bytes at {floor.push_gbps} GB/s + {floor.signalling_us} µs"
    return Series(name, _FLOOR, tuple((count, times * floor.floor_us(count)) for count in tokens))


def _style_of(record: dict[str, Any]) -> Style:
    style = _OTHERS.get(record["library"], _UNKNOWN)
    if record["how"] == "graph":
        return Style(style.colour, style.marker, style.dash, style.width, hollow=True)
    return style


def _measured(run: data.Run, operation: str) -> list[Series]:
    ours = run.label == data.OURS
    names = {"idle": "host-timed, idle stream", "graph": "graph replay"}
    series = []
    for how, name in names.items():
        style = _OURS[how] if ours else _OTHERS.get(run.label, _UNKNOWN)
        points = tuple(run.series(f"{how}.{operation}.median_us"))
        if ours or how == "idle":
            series.append(Series(f"{run.label} ({name})", style, points))
    return series


def _legend(panels: list[Panel]) -> list[Series]:
    """Each name once: ours first, the floor last. A line in any panel is a line here."""
    found: dict[str, Series] = {}
    for panel in panels:
        for series in panel.series:
            if len(series.points) > len(found.get(series.name, Series("", _FLOOR, ())).points):
                found[series.name] = series
    order = sorted(found.values(), key=lambda series: (
        not series.name.startswith(data.OURS), series.name.startswith("floor")))
    return order


if __name__ == "__main__":
    sys.exit(main())
