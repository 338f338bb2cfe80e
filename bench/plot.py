#!/usr/bin/env python3
"""Draws docs/plots/ from results.csv: what all libraries took in one run, both modes over tokens, and the
guide's diagrams. `make plots` runs it, with the matplotlib that scripts/plots-requirements.lock pins.

A picture carries the digest of what it shows and of the code that drew it, so that a test without matplotlib
finds one that is out of date.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import diagrams
import results
import rows
from results import ALL_SMS, HT_TOKENS, OURS, USUAL_SMS, Floor, Row, where
from tables_run import one_run, today

PLOTS = rows.ROOT / "docs" / "plots"
_RANKS = ("2", "4", "8")
# Ways by which libraries are compared, in order of preference: an idle stream would add the launch.
_COMPARED = ("graph", "kernel", "queued", "waited")

# Okabe and Ito's palette, distinguishable with most kinds of colour blindness: colour and marker.
_STYLES = {
    "NCCL EP, first release": ("#d55e00", "s"), "NCCL EP": ("#d55e00", "s"),
    "NCCL EP 0.1.0": ("#e69f00", "D"), "NCCL EP 0.1.0, rank-major": ("#e69f00", "d"),
    "NCCL EP, May 2026": ("#e69f00", "h"), "DeepEP V1": ("#cc79a7", "v"),
    "DeepEP V2": ("#9b4f7c", "^"), "DeepEP V2, expanded": ("#9b4f7c", ">"),
    "MSCCL++ EP": ("#009e73", "^"), "MSCCL++ EP, exact order": ("#009e73", "v"),
}
_OURS, _OURS_TOO, _FLOOR, _GREY = "#0072b2", "#56b4e9", "#52606d", "#9aa5b1"
# What a reader with a dark page sees instead; the colours of data serve both.
_DARK = {"#ffffff": "#0d1117", "#f5f7fa": "#161b22", "#e4e7eb": "#30363d", "#000000": "#e6edf3",
         "#1f2933": "#e6edf3", "#52606d": "#8b949e"}
_TIMED = {"graph": "graph", "idle": "idle stream", "queued": "queued", "waited": "host waits",
          "kernel": "kernel"}


@dataclasses.dataclass(frozen=True)
class Series:
    """Microseconds over tokens; one point has no line."""

    name: str
    colour: str
    marker: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    hollow: bool = False


@dataclasses.dataclass(frozen=True)
class Bars:
    """Library, microseconds; the shortest first."""

    title: str
    bars: tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class Picture:
    """A title, what was measured, and panels: each a title with its series, or bars."""

    title: str
    detail: str
    panels: tuple[Any, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=PLOTS, metavar="DIR")
    arguments = parser.parse_args()
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "nccl-ep", "font.size": 9,
                                "font.family": "DejaVu Sans", "axes.grid": True,
                                "grid.color": "#e4e7eb", "axes.axisbelow": True})
    arguments.out.mkdir(parents=True, exist_ok=True)
    shown = pictures(results.load())
    for name, digest in digests(shown).items():
        figure = _draw(shown[name]) if name in shown else diagrams.DRAW[name]()
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg",
                       metadata={"Date": None, "Creator": None, "Description": digest})
        file = arguments.out / f"{name}.svg"
        file.write_text(re.sub(r"\s*\n\s*", " ", _for_dark_pages(drawn.getvalue())).strip() + "\n")
        print(file)
    return 0


def _for_dark_pages(drawn: str) -> str:
    rules = [f'[style*="{part}: {light}"] {{{part}: {dark} !important}}'
             for light, dark in _DARK.items() for part in ("fill", "stroke")]
    rules.append(f'text:not([style*="fill: "]) {{fill: {_DARK["#000000"]}}}')
    return drawn.replace("</style>", f" @media (prefers-color-scheme: dark) {{{' '.join(rules)}}}</style>", 1)


def digests(shown: dict[str, Picture]) -> dict[str, str]:
    """Of what each picture shows, and of the code that draws it."""
    def digest(content: str, module: str) -> str:
        code = (rows.BENCH / f"{module}.py").read_text()
        return hashlib.sha256(f"{content}{code}".encode()).hexdigest()

    return {**{name: digest(repr(picture), "plot") for name, picture in shown.items()},
            **{name: digest(name, "diagrams") for name in diagrams.DRAW}}


def pictures(all_rows: Sequence[Row]) -> dict[str, Picture]:
    """By name, without the diagrams, which show no results."""
    shape = "hidden 7168, top-8 of 256 experts, bfloat16"
    both = "dispatch and combine; their sum where they were not timed together"
    return {
        "one-run": Picture("Microseconds on 2 x H100, all libraries in one run, and this one today, in CUDA graphs",
                           f"{shape}; LL: low latency, HT: high throughput with {USUAL_SMS} SMs", _one_run(all_rows)),
        "low-latency": Picture("Low latency: microseconds over tokens of each rank",
                               f"{shape}; {both}", _panels(all_rows, "ll")),
        "high-throughput": Picture("High throughput: microseconds over tokens of each rank",
                                   f"{shape}; {both}", _panels(all_rows, "ht")),
    }


def _one_run(all_rows: Sequence[Row]) -> tuple[Bars, ...]:
    panels = []
    for mode, name, tokens, sms, operation in (
            ("ll", "LL, 1 token: both operations", "1", "", "pair"),
            ("ll", "LL, 128 tokens: both operations", "128", "", "pair"),
            ("ht", f"HT, {HT_TOKENS} tokens: dispatch", HT_TOKENS, USUAL_SMS, "dispatch"),
            ("ht", f"HT, {HT_TOKENS} tokens: combine", HT_TOKENS, USUAL_SMS, "combine")):
        shown = [(row["library"], row) for row in one_run(all_rows, mode=mode, tokens=tokens, sms=sms)]
        for library, low, high in today(all_rows):
            of = {"ll": where(low, tokens=tokens), "ht": [high]}[mode]
            shown += [(f"{library}, today", row) for row in of]
        bars = [(library, time) for library, row in shown if (time := row.time("graph", operation)) is not None]
        panels.append(Bars(name, tuple(sorted(bars, key=lambda bar: bar[1]))))
    return tuple(panels)


def _panels(all_rows: Sequence[Row], mode: str) -> tuple[tuple[str, tuple[Series, ...]], ...]:
    return tuple((f"{ranks} GPUs", tuple(_series(all_rows, mode, ranks))) for ranks in _RANKS)


def _series(all_rows: Sequence[Row], mode: str, ranks: str) -> list[Series]:
    """The floor, ours, then the others on top, since many are single points."""
    reach = [2 ** (step / 2) for step in (range(0, 21) if mode == "ll" else range(18, 29))]
    series = [Series("floor: 346 GB/s + 5 us, twice", _FLOOR, "", tuple(
        (tokens, 2 * Floor(int(ranks)).us(tokens)) for tokens in reach), dashed=True)]
    ours = where(all_rows, name="sweep", mode=mode, ranks=ranks, routing="scores")
    cases = ((("graph", "", _OURS, False), ("idle", "", _OURS_TOO, True)) if mode == "ll" else
             (("graph", USUAL_SMS, _OURS, False), ("graph", ALL_SMS, _OURS_TOO, True)))
    for way, sms, colour, hollow in cases:
        name = f"{OURS} ({_TIMED[way]})" if mode == "ll" else (
            f"{OURS}, {'all' if sms == ALL_SMS else sms} SMs ({_TIMED[way]})")
        series.append(Series(name, colour, "o", _points(where(ours, sms=sms), way), hollow=hollow))
    others = where(all_rows, name="peers", mode=mode, ranks=ranks)
    for library, sms in dict.fromkeys((row["library"], row["sms"]) for row in others):
        chosen = where(others, library=library, sms=sms)
        ways = {way for row in chosen for way in row.ways()}
        way = next((way for way in _COMPARED if way in ways), "")
        if way:
            name = f"{library}{f', {sms} SMs' if sms else ''} ({_TIMED[way]})"
            series.append(Series(name, *_STYLES[library], _points(chosen, way),
                                 hollow=way == "graph"))
    return [entry for entry in series if entry.points]


def _points(chosen: Sequence[Row], way: str) -> tuple[tuple[float, float], ...]:
    found = []
    for row in chosen:
        dispatch, combine, pair = row.times(way)
        if pair is not None:
            found.append((row.tokens, pair))
        elif dispatch is not None and combine is not None:
            found.append((row.tokens, round(dispatch + combine, 4)))
    return tuple(sorted(found))


def _draw(picture: Picture) -> Any:
    from matplotlib.figure import Figure
    if isinstance(picture.panels[0], Bars):
        figure = Figure(figsize=(9.6, 4.4), layout="constrained")
        for axes, bars in zip(figure.subplots(2, 2).flat, picture.panels):
            _draw_bars(axes, bars)
    else:
        figure = Figure(figsize=(9.6, 5.2), layout="constrained")
        named: dict[str, Any] = {}
        for axes, (title, series) in zip(figure.subplots(1, len(picture.panels)), picture.panels):
            for entry in series:
                named.setdefault(entry.name, _draw_series(axes, entry))
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:g}")
            axes.set_title(title, loc="left", fontsize=10)
        figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=3,
                      fontsize=8, frameon=False)
    figure.suptitle(f"{picture.title}\n{picture.detail}", x=0.01, ha="left", fontsize=10)
    return figure


def _draw_series(axes: Any, series: Series) -> Any:
    x, y = zip(*series.points)
    line, = axes.plot(x, y, color=series.colour, marker=series.marker, markersize=5,
                      linestyle="--" if series.dashed else "-",
                      linewidth=1.2 if series.dashed else 1.6,
                      markerfacecolor="white" if series.hollow else series.colour)
    return line


def _draw_bars(axes: Any, panel: Bars) -> None:
    names, times = zip(*panel.bars)
    drawn = axes.barh(names, times, height=0.7, color=[_OURS if name.startswith(OURS) else _GREY for name in names])
    axes.bar_label(drawn, [f"{time:.1f}" if time < 100 else f"{time:.0f}" for time in times], padding=3)
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.margins(x=0.15)
    axes.grid(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


if __name__ == "__main__":
    raise SystemExit(main())
