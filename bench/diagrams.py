"""Pictures for the guide: what dispatch and combine do, and how received rows lie in memory.

One small routing serves all of them: two ranks, two experts on each, two tokens of each, top-2. Coordinates are
pixels from the upper left corner.
"""

from __future__ import annotations

from typing import Any

# Token: its rank, and its experts with their weights.
_TOKENS = {"a": (0, ((0, 0.25), (2, 0.75))), "b": (0, ((0, 0.5), (1, 0.5))),
           "c": (1, ((2, 0.25), (3, 0.75))), "d": (1, ((1, 0.5), (2, 0.5)))}
_RANKS, _LOCAL, _MOST_TOKENS, _TOP_K = 2, 2, 2, 2
_COLOURS = {"a": "#0072b2", "b": "#56b4e9", "c": "#d55e00", "d": "#e69f00"}
_INK, _FAINT, _FRAME, _PAPER = "#1f2933", "#9aa5b1", "#52606d", "#f5f7fa"
_ON_DARK = {"a", "c"}  # tokens on whose colours light letters are read best
_LIGHT_LETTERS, _DARK_LETTERS = "#fefefe", "#1f2932"  # on tokens, which dark pages leave as they are
_CELL_W, _CELL_H = 44, 28
_DPI = 100


class _Sheet:
    """A figure without axes' marks."""

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.figure import Figure
        self.figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.set_axis_off()

    def text(self, x: float, y: float, content: str, size: float = 12, align: str = "left",
             **more: Any) -> None:
        """Sizes in pixels; `y` is the base line."""
        self.axes.text(x, y, content, fontsize=size * 72 / _DPI, ha=align,
                       **{"color": _INK, **more})

    def rectangle(self, x: float, y: float, width: float, height: float, **more: Any) -> None:
        from matplotlib.patches import Rectangle
        self.axes.add_patch(Rectangle((x, y), width, height, linewidth=0.8, **more))

    def box(self, x: float, y: float, width: float, height: float, title: str) -> None:
        self.rectangle(x, y, width, height, facecolor=_PAPER, edgecolor=_FRAME)
        self.text(x + 10, y + 19, title, weight="bold")

    def cell(self, x: float, y: float, content: str, token: str = "",
             width: float = _CELL_W) -> None:
        """A row or an element: in the token's colour, or empty and dashed."""
        colour = _COLOURS.get(token, "#ffffff")
        self.rectangle(x, y, width, _CELL_H, facecolor=colour,
                       edgecolor=colour if token else _FAINT, linestyle="-" if token else "--")
        self.text(x + width / 2, y + _CELL_H / 2 + 5, content, 13, "center",
                  color=_INK if not token else _LIGHT_LETTERS if token in _ON_DARK else _DARK_LETTERS)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        self.axes.annotate("", xy=end, xytext=start,
                           arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.8})

    def number(self, x: float, y: float, content: str, faint: bool = False) -> None:
        self.rectangle(x, y, _CELL_W, _CELL_H, facecolor="#ffffff", edgecolor=_FAINT)
        self.text(x + _CELL_W / 2, y + _CELL_H / 2 + 5, content, 13, "center",
                  color=_FAINT if faint else _INK)

    def curve(self, start: tuple[float, float], end: tuple[float, float], token: str) -> None:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path
        middle = (start[0] + end[0]) / 2
        path = Path([start, (middle, start[1]), (middle, end[1]), end],
                    [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
        self.axes.add_patch(PathPatch(path, fill=False, edgecolor=_COLOURS[token], linewidth=1.5))


def _experts_of(token: str) -> list[int]:
    return [expert for expert, _ in _TOKENS[token][1]]


def _received_ll(expert: int) -> list[str]:
    """An expert's rows, by source rank and token."""
    return [token for token in _TOKENS if expert in _experts_of(token)]


def _received_ht(rank: int) -> list[str]:
    """A rank's rows: each token once."""
    return [token for token in _TOKENS
            if any(expert // _LOCAL == rank for expert in _experts_of(token))]


def _dispatch_combine() -> Any:
    left, middle, right, step = 30, 300, 710, 172
    sheet = _Sheet(900, 52 + _RANKS * step)
    sheet.text(left, 30, "dispatch: each token goes to the ranks of its experts", 15, weight="bold")
    sheet.text(right + 160, 30, "combine: the weighted sum comes home", 15, "right", weight="bold")
    homes, sums = {}, {}
    for rank in range(_RANKS):
        y = 52 + rank * step
        sheet.box(left, y, 150, 150, f"rank {rank}: tokens")
        sheet.box(right, y, 160, 150, f"rank {rank}: output")
        for index, token in enumerate(t for t, (home, _) in _TOKENS.items() if home == rank):
            row = y + 40 + index * 52
            sheet.cell(left + 20, row, token, token)
            sheet.cell(right + 20, row, "Σ", token)
            weights = " + ".join(f"{weight:g} e{expert}" for expert, weight in _TOKENS[token][1])
            sheet.text(right + 20, row + 43, weights, 11)
            experts = ", ".join(str(expert) for expert in _experts_of(token))
            sheet.text(left + 72, row + 18, f"→ {experts}")
            homes[token] = (left + 115, row + 14)
            sums[token] = (right + 20, row + 14)
    for expert in range(_RANKS * _LOCAL):
        rank, local = divmod(expert, _LOCAL)
        y = 52 + rank * step
        if local == 0:
            sheet.box(middle, y, 290, 150, f"rank {rank}: experts")
        row = y + 36 + local * 54
        sheet.text(middle + 22, row + 19, f"expert {expert}")
        for slot, token in enumerate(_received_ll(expert)):
            sheet.cell(middle + 100 + slot * (_CELL_W + 8), row, token, token)
            sheet.curve(homes[token], (middle, row + 14), token)
            sheet.curve((middle + 290, row + 14), sums[token], token)
    return sheet.figure


def _layout_ll() -> Any:
    slots, step = _RANKS * _MOST_TOKENS, 142
    end = 52 + _RANKS * step
    sheet = _Sheet(680, end + 36)
    sheet.text(30, 30, "Low latency: TOKENS [L, R*M, H], one block of slots for each expert", 15,
               weight="bold")
    for rank in range(_RANKS):
        y = 52 + rank * step
        sheet.box(30, y, 620, 126, f"rank {rank}")
        for slot in range(slots):
            sheet.text(240 + slot * 60, y + 22, f"slot {slot}", 11, "center")
        sheet.text(560, y + 22, "counter [L]", 11, "center")
        for local in range(_LOCAL):
            received = _received_ll(rank * _LOCAL + local)
            top = y + 36 + local * 42
            sheet.text(44, top + 19, f"local {local} (expert {rank * _LOCAL + local})")
            for slot in range(slots):
                token = received[slot] if slot < len(received) else ""
                sheet.cell(240 + slot * 60 - _CELL_W / 2, top, token, token)
            sheet.number(560 - _CELL_W / 2, top, str(len(received)))
    sheet.text(30, end + 4,
               "Rows are packed from slot 0, by source rank, token, k. Ids and weights stay at")
    sheet.text(30, end + 22,
               "home, where combine applies the weights. Dashed slots keep what they held.")
    return sheet.figure


def _layout_ht() -> Any:
    step, columns = 206, (150, 290, 470)
    end = 52 + _RANKS * step
    sheet = _Sheet(680, end + 36)
    sheet.text(30, 30, "High throughput: one row for each token, whatever its experts here", 15,
               weight="bold")
    for rank in range(_RANKS):
        y = 52 + rank * step
        received = _received_ht(rank)
        sheet.box(30, y, 620, 190, f"rank {rank}")
        for x, name in zip(columns, ("TOKENS [n, H]", "TOPK_IDX [n, K]", "TOPK_WEIGHTS [n, K]")):
            sheet.text(x, y + 22, name, 11)
        for index in range(_RANKS * _MOST_TOKENS):
            top = y + 34 + index * 38
            token = received[index] if index < len(received) else ""
            sheet.text(44, top + 19, f"row {index}")
            sheet.cell(columns[0], top, token or "0", token, 90)
            here = [(expert % _LOCAL, weight) for expert, weight in sorted(_TOKENS[token][1])
                    if expert // _LOCAL == rank] if token else []
            for k in range(_TOP_K):
                known = k < len(here)
                sheet.number(columns[1] + k * _CELL_W, top, str(here[k][0]) if known else "-1",
                             not known)
                sheet.number(columns[2] + k * _CELL_W, top, f"{here[k][1]:g}" if known else "0",
                             not known)
    sheet.text(30, end + 4,
               "Rows are in the order of source rank and token. Ids are local and ascending,")
    sheet.text(30, end + 22, "then -1. Rows behind the last one are 0, -1 and 0 (dashed).")
    return sheet.figure


def _rail_peers() -> Any:
    sheet = _Sheet(760, 330)
    sheet.text(30, 30, "Several nodes: a row crosses the network once, and its rail peer forwards it", 15,
               weight="bold")
    at = {}
    for node in range(2):
        sheet.box(30 + node * 400, 52, 300, 210, f"node {node}")
        for local in range(3):
            x, y = 60 + node * 400 + local * 85, 100 + local * 52
            sheet.cell(x, y, f"{3 * node + local}", "abc"[local], 60)
            at[node, local] = (x, y + _CELL_H / 2)
    for local in range(3):
        (x, y), (to, _) = at[0, local], at[1, local]
        sheet.axes.plot((x + 60, to), (y, y), color=_FAINT, linestyle="--", linewidth=1)
    start, peer = at[0, 0], at[1, 0]
    sheet.arrow((start[0] + 60, start[1]), peer, _COLOURS["a"])
    near, far = at[1, 1], at[1, 2]
    sheet.arrow((peer[0] + 40, peer[1] + 14), (near[0] + 20, near[1] - 14), _COLOURS["a"])
    sheet.arrow((peer[0] + 60, peer[1] + 4), (far[0] + 45, far[1] - 14), _COLOURS["a"])
    sheet.text(365, 92, "network", 11)
    sheet.text(635, 140, "NVLink", 11)
    sheet.text(30, 290,
               "Rank 0 sends a token for experts on ranks 4 and 5 to its rail peer, rank 3, alone. Dashed: rails.")
    sheet.text(30, 312,
               "Combine goes back the same way: rank 3 sums what its node has for the token, and sends one row.")
    return sheet.figure


def _staged() -> Any:
    sheet = _Sheet(860, 220)
    sheet.text(30, 30, "Staged operations: rows of one micro-batch travel while the other computes", 15, weight="bold")
    steps = (("A", "a", ((0, "send"), (2, "receive"), (3, "experts"), (4, "send"), (8, "receive"))),
             ("B", "b", ((1, "send"), (5, "receive"), (6, "experts"), (7, "send"), (9, "receive"))))
    width = 76
    for line, (batch, token, boxes) in enumerate(steps):
        y = 62 + line * 56
        sheet.text(30, y + 19, f"batch {batch}", weight="bold")
        for place, what in boxes:
            sheet.cell(90 + place * width, y, what, token, width - 6)
        for (place, what), (later, _) in zip(boxes, boxes[1:]):
            if what == "send" and later > place + 1:
                x = 90 + place * width + width - 6
                sheet.axes.plot((x, 90 + later * width), (y + 14, y + 14), color=_COLOURS[token], linestyle=":")
    sheet.arrow((90, 180), (90 + 10 * width, 180), _FRAME)
    sheet.text(90, 200, "time on one stream; dotted: rows on NVLink or the network, no SM busy")
    return sheet.figure


# By the picture's name.
DRAW = {"rail-peers": _rail_peers, "staged": _staged, "dispatch-combine": _dispatch_combine,
        "layout-ll": _layout_ll, "layout-ht": _layout_ht}
