"""Pictures of low latency: dispatch, combine, and both together over tokens, for this library,
others and the floor.
"""

from __future__ import annotations

from typing import Any

import chart_style
import data
from svg import Panel, Series, Style

_TOKENS = (1, 1024)
_PANELS = (("Dispatch", "dispatch"), ("Combine", "combine"), ("Dispatch and combine", "pair"))
_OURS = {"idle": Style(chart_style.OUR_COLOURS[0], "circle", width=3),
         "graph": Style(chart_style.OUR_COLOURS[0], "circle", "2 5", 2.4, hollow=True)}


def draw(ranks: int, runs: list[data.Run], records: dict[str, Any]) -> str:
    """The picture for one number of ranks."""
    panels = [Panel(title, tuple(_series(ranks, operation, runs, records)))
              for title, operation in _PANELS]
    values = [y for panel in panels for series in panel.series for _, y in series.points]
    y_range = (4.0, max(256.0, 1.15 * max(values)))
    return chart_style.picture(
        f"Low latency on {ranks} GPUs: latency over tokens",
        chart_style.measured_on(ranks, runs),
        [(panel, _TOKENS, y_range, "tokens of each rank") for panel in panels])


def _series(ranks: int, operation: str, runs: list[data.Run],
            records: dict[str, Any]) -> list[Series]:
    """The floor, ours, then the others on top, since many are single points."""
    series = [_floor(ranks, operation, records)]
    for run in runs:
        series += _measured(run, operation)
    for record in data.records_of(records, "ll", ranks):
        points = tuple((point["tokens"], point[operation])
                       for point in record["points"] if operation in point)
        name = f"{record['library']} ({chart_style.HOW[record['how']]})"
        series.append(Series(name, chart_style.style_of(record), points))
    return [entry for entry in series if entry.points]


def _floor(ranks: int, operation: str, records: dict[str, Any]) -> Series:
    floor = data.floor_of(ranks, records)
    times = 2 if operation == "pair" else 1
    tokens = [2 ** (step / 4) for step in range(0, 41)]
    return Series(chart_style.floor_name(floor), chart_style.FLOOR,
                  tuple((count, times * floor.floor_us(count)) for count in tokens))


def _measured(run: data.Run, operation: str) -> list[Series]:
    ours = run.label == data.OURS
    names = {"idle": "host-timed, idle stream", "graph": "graph replay"}
    series = []
    for how, name in names.items():
        style = _OURS[how] if ours else chart_style.OTHERS.get(run.label, chart_style.UNKNOWN)
        points = tuple(run.series(f"{how}.{operation}.median_us"))
        if ours or how == "idle":
            series.append(Series(f"{run.label} ({name})", style, points))
    return series
