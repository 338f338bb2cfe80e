"""A small chart in SVG: panels with logarithmic axes to the base 2, lines, points and a legend.

Hand-written, so pictures need nothing but Python and a new measurement changes few lines of the
committed files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

FONT = "font-family='DejaVu Sans, Verdana, Arial, sans-serif'"
BOLD = " font-weight='600'"
_INK = "#1f2933"
_FAINT = "#616e7c"
_GRID = "#e4e7eb"

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Style:
    """How a series looks. Marker and dashes repeat the colour, for colour-blind readers."""

    colour: str
    marker: str = ""  # circle, square, diamond, triangle, cross or none
    dash: str = ""
    width: float = 2
    hollow: bool = False


@dataclasses.dataclass(frozen=True)
class Series:
    """Points in data units; joined by a line if there are several and `joined` says so."""

    name: str
    style: Style
    points: tuple[Point, ...]
    joined: bool = True


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes and what is drawn in it."""

    title: str
    series: tuple[Series, ...]


@dataclasses.dataclass(frozen=True)
class Frame:
    """A panel's rectangle in the picture, and the data ranges of its axes."""

    left: float
    top: float
    width: float
    height: float
    x_range: Point
    y_range: Point

    def x(self, value: float) -> float:
        return self.left + self.width * _fraction(value, self.x_range)

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - _fraction(value, self.y_range))


def _fraction(value: float, limits: Point) -> float:
    low, high = (math.log2(limit) for limit in limits)
    return (math.log2(value) - low) / (high - low)


def text(x: float, y: float, content: str, size: float = 12, anchor: str = "start",
         extra: str = "") -> str:
    return (f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' "
            f"fill='{_INK}' {FONT}{extra}>{escape(content)}</text>")


def powers_of_two(limits: Point) -> list[int]:
    low, high = (math.log2(limit) for limit in limits)
    return [2 ** power for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]


def draw_panel(panel: Panel, frame: Frame, x_label: str, y_label: str) -> list[str]:
    centre, middle = frame.left + frame.width / 2, frame.top + frame.height / 2
    parts = _axes(frame)
    parts.append(text(frame.left, frame.top - 12, panel.title, 14, extra=BOLD))
    parts.append(text(centre, frame.top + frame.height + 40, x_label, 12, "middle"))
    turned = f" transform='rotate(-90 {frame.left - 44:.1f} {middle:.1f})'"
    if y_label:
        parts.append(text(frame.left - 44, middle, y_label, 12, "middle", turned))
    for series in panel.series:
        parts += _draw_series(series, frame)
    return parts


def _axes(frame: Frame) -> list[str]:
    right, bottom = frame.left + frame.width, frame.top + frame.height
    parts = []
    for value in powers_of_two(frame.y_range):
        y = frame.y(value)
        parts.append(_line((frame.left, y), (right, y), _GRID))
        parts.append(text(frame.left - 8, y + 4, str(value), 11, "end"))
    for value in powers_of_two(frame.x_range):
        x = frame.x(value)
        parts.append(_line((x, frame.top), (x, bottom), _GRID))
        parts.append(text(x, bottom + 18, str(value), 11, "middle"))
    parts.append(_line((frame.left, bottom), (right, bottom), _FAINT))
    parts.append(_line((frame.left, frame.top), (frame.left, bottom), _FAINT))
    return parts


def _line(start: Point, end: Point, colour: str) -> str:
    return (f"<line x1='{start[0]:.1f}' y1='{start[1]:.1f}' x2='{end[0]:.1f}' y2='{end[1]:.1f}' "
            f"stroke='{colour}' stroke-width='1'/>")


def _draw_series(series: Series, frame: Frame) -> list[str]:
    places = [(frame.x(x), frame.y(y)) for x, y in series.points]
    parts = [_polyline(places, series.style)] if series.joined and len(places) > 1 else []
    return parts + [draw_marker(place, series.style) for place in places]


def _polyline(places: Iterable[Point], style: Style) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = f" stroke-dasharray='{style.dash}'" if style.dash else ""
    return (f"<polyline points='{joined}' fill='none' stroke='{style.colour}' "
            f"stroke-width='{style.width}' stroke-linejoin='round' stroke-linecap='round'{dash}/>")


_CORNERS = {
    "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
    "diamond": ((0, -5.8), (5.8, 0), (0, 5.8), (-5.8, 0)),
    "triangle": ((0, -5.5), (5.2, 4), (-5.2, 4)),
    "down": ((0, 5.5), (5.2, -4), (-5.2, -4)),
}


def draw_marker(place: Point, style: Style) -> str:
    x, y = place
    paint = (f"fill='{'#ffffff' if style.hollow else style.colour}' stroke='"
             f"{style.colour if style.hollow else '#ffffff'}' stroke-width='"
             f"{1.8 if style.hollow else 0.8}'")
    if style.marker == "circle":
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4.4' {paint}/>"
    if style.marker in _CORNERS:
        corners = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in _CORNERS[style.marker])
        return f"<polygon points='{corners}' {paint}/>"
    return ""


def draw_legend(series: Sequence[Series], left: float, top: float, columns: int,
                column_width: float) -> list[str]:
    """Entries row by row, in the given order."""
    parts = []
    for index, entry in enumerate(series):
        x = left + index % columns * column_width
        y = top + index // columns * 22
        if entry.joined and entry.points and len(entry.points) != 1:
            parts.append(_polyline([(x, y), (x + 30, y)], entry.style))
        parts.append(draw_marker((x + 15, y), entry.style))
        parts.append(text(x + 40, y + 4, entry.name, 12))
    return parts


def picture(width: float, height: float, parts: Sequence[str]) -> str:
    head = (f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
            f"viewBox='0 0 {width:.0f} {height:.0f}'>")
    background = "<rect width='100%' height='100%' fill='#ffffff'/>"
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"
