"""Pictures of high throughput: dispatch and combine over tokens, and both over SMs, for this
library, others and the floor.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import chart_style
import data
from svg import Panel, Point, Series, Style

_TOKENS = (512, 16384)
_SMS = (7, 150)
_OPERATIONS = ("dispatch", "combine")
_LIGHT = chart_style.OUR_COLOURS[1]
_DARK = chart_style.OUR_COLOURS[0]
_OVER_TOKENS = {data.USUAL_SMS: Style(_DARK, "circle", width=3),
                data.ALL_SMS: Style(_LIGHT, "circle", "2 5", 2.4, hollow=True)}
_SKEWED = Style("#009e73", "square", "6 4")
_OVER_SMS = {"dispatch": Style(_DARK, "circle", width=3),
             "combine": Style(_DARK, "down", "2 5", 2.4, hollow=True)}


def draw(ranks: int, runs: list[data.Run], records: dict[str, Any]) -> str:
    """The picture for one number of ranks."""
    over_tokens = [Panel(operation.capitalize(),
                         tuple(_over_tokens(ranks, operation, runs, records)))
                   for operation in _OPERATIONS]
    over_sms = Panel(f"{data.HT_TOKENS} tokens; combine is hollow",
                     tuple(_over_sms(ranks, runs, records)))
    wide, narrow = _range(over_tokens), _range([over_sms])
    plans = [(panel, _TOKENS, wide, "tokens of each rank") for panel in over_tokens]
    return chart_style.picture(f"High throughput on {ranks} GPUs: latency over tokens and SMs",
                               chart_style.measured_on(ranks, runs),
                               [*plans, (over_sms, _SMS, narrow, "SMs that may be used")])


def _range(panels: list[Panel]) -> Point:
    """The range of values, widened to powers of two, where the grid lines are."""
    values = [y for panel in panels for series in panel.series for _, y in series.points]
    return (2.0 ** math.floor(math.log2(min(values) / 1.1)),
            2.0 ** math.ceil(math.log2(max(values) * 1.1)))


def _floor(floor: data.Floor, points: tuple[Point, ...]) -> Series:
    return Series(chart_style.floor_name(floor), chart_style.FLOOR, points)


def _over_tokens(ranks: int, operation: str, runs: list[data.Run],
                 records: dict[str, Any]) -> list[Series]:
    floor = data.floor_of(ranks, records)
    tokens = [_TOKENS[0] * 2 ** (step / 4) for step in range(0, 21)]
    series = [_floor(floor, tuple((count, floor.floor_us(count)) for count in tokens))]
    for run in runs:
        style = _style_over_tokens(run)
        if style is not None:
            name = f"{run.label}, {_sms_text(run.sms)}, {_routing_text(run)}"
            series.append(Series(name, style, tuple(run.series(f"idle.{operation}.median_us"))))
    for record in data.records_of(records, "ht", ranks):
        points = tuple((point["tokens"], point[operation]) for point in record["points"])
        series.append(Series(_record_name(record), chart_style.style_of(record), points))
    return series


def _style_over_tokens(run: data.Run) -> Style | None:
    """None for runs that this panel leaves to the one over SMs."""
    if run.label != data.OURS:
        return chart_style.OTHERS.get(run.label, chart_style.UNKNOWN)
    if run.routing == "scores":
        return _OVER_TOKENS.get(run.sms)
    return _SKEWED if run.sms == data.USUAL_SMS else None


def _over_sms(ranks: int, runs: list[data.Run], records: dict[str, Any]) -> list[Series]:
    """Both operations; of other libraries only figures with a known number of SMs."""
    floor = data.floor_of(ranks, records)
    least = floor.floor_us(data.HT_TOKENS)
    series = [_floor(floor, tuple((sms, least) for sms in _SMS))]
    for operation in _OPERATIONS:
        points = [(run.sm_count, run.value(data.HT_TOKENS, f"idle.{operation}.median_us"))
                  for run in data.with_all_sms(runs, ranks)]
        known = tuple((sms, time) for sms, time in points if sms and time is not None)
        series.append(Series(f"{data.OURS}, {operation} over SMs", _OVER_SMS[operation], known))
    for record in data.records_of(records, "ht", ranks):
        if "sms" in record:
            series += _record_over_sms(record)
    return [entry for entry in series if entry.points]


def _record_over_sms(record: dict[str, Any]) -> list[Series]:
    """Figures of other libraries; combine is hollow, as ours is."""
    found = []
    for operation in _OPERATIONS:
        style = dataclasses.replace(chart_style.style_of(record), hollow=operation == "combine")
        points = tuple((record["sms"], point[operation]) for point in record["points"]
                       if point["tokens"] == data.HT_TOKENS)
        found.append(Series(_record_name(record), style, points))
    return found


def _sms_text(sms: str) -> str:
    return f"{sms} SMs" if sms != data.LIBRARYS_CHOICE else "SMs of its choice"


def _routing_text(run: data.Run) -> str:
    return "uniform" if run.routing == "scores" else f"Zipf {run.config['zipf_exponent']:g}"


def _record_name(record: dict[str, Any]) -> str:
    sms = f", {record['sms']} SMs" if "sms" in record else ""
    return f"{record['library']}{sms} ({chart_style.HOW[record['how']]})"
