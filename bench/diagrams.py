"""Pictures for the guide: what dispatch and combine do, and how received rows lie in memory.

One small routing serves all of them: two ranks, two experts on each, two tokens of each, top-2.
"""

from __future__ import annotations

import svg
from svg import text

# Token: its rank, and its experts with their weights.
_TOKENS = {"a": (0, ((0, 0.25), (2, 0.75))), "b": (0, ((0, 0.5), (1, 0.5))),
           "c": (1, ((2, 0.25), (3, 0.75))), "d": (1, ((1, 0.5), (2, 0.5)))}
_RANKS, _LOCAL, _MOST_TOKENS, _TOP_K = 2, 2, 2, 2
_COLOURS = {"a": "#0072b2", "b": "#56b4e9", "c": "#d55e00", "d": "#e69f00"}
_FAINT, _FRAME, _PAPER = "#9aa5b1", "#52606d", "#f5f7fa"
_CELL_W, _CELL_H = 44, 28


def draw_all() -> dict[str, str]:
    """Pictures by file name."""
    return {"dispatch-combine.svg": _dispatch_combine(), "layout-ll.svg": _layout_ll(),
            "layout-ht.svg": _layout_ht()}


def _experts_of(token: str) -> list[int]:
    return [expert for expert, _ in _TOKENS[token][1]]


def _received_ll(expert: int) -> list[str]:
    """An expert's rows, by source rank and token."""
    return [token for token in _TOKENS if expert in _experts_of(token)]


def _received_ht(rank: int) -> list[str]:
    """A rank's rows: each token once."""
    return [token for token in _TOKENS
            if any(expert // _LOCAL == rank for expert in _experts_of(token))]


def _box(x: float, y: float, width: float, height: float, title: str) -> list[str]:
    return [f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' rx='6' "
            f"fill='{_PAPER}' stroke='{_FRAME}' stroke-width='1'/>",
            text(x + 10, y + 19, title, 12, extra=svg.BOLD)]


def _cell(x: float, y: float, content: str, token: str = "", width: float = _CELL_W) -> list[str]:
    """A row or an element: in the token's colour, or empty and dashed."""
    fill, stroke = (_COLOURS[token], _COLOURS[token]) if token else ("#ffffff", _FAINT)
    dash = "" if token else " stroke-dasharray='4 3'"
    shown = text(x + width / 2, y + _CELL_H / 2 + 5, content, 13, "middle")
    if token:
        shown = shown.replace("#1f2933", "#ffffff")
    frame = (f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{_CELL_H}' rx='4' "
            f"fill='{fill}' stroke='{stroke}' stroke-width='1'{dash}/>")
    return [frame, shown] if content else [frame]


def _number(x: float, y: float, content: str, faint: bool = False) -> list[str]:
    shown = text(x + _CELL_W / 2, y + _CELL_H / 2 + 5, content, 13, "middle")
    return [f"<rect x='{x:.1f}' y='{y:.1f}' width='{_CELL_W}' height='{_CELL_H}' fill='#ffffff' "
            f"stroke='{_FAINT}' stroke-width='1'/>",
            shown.replace("#1f2933", _FAINT) if faint else shown]


def _notes(y: float, *lines: str) -> list[str]:
    return [text(30, y + 4 + 18 * index, line) for index, line in enumerate(lines)]


def _curve(start: svg.Point, end: svg.Point, token: str) -> str:
    middle = (start[0] + end[0]) / 2
    return (f"<path d='M {start[0]:.1f} {start[1]:.1f} C {middle:.1f} {start[1]:.1f} {middle:.1f} "
            f"{end[1]:.1f} {end[0]:.1f} {end[1]:.1f}' fill='none' stroke='{_COLOURS[token]}' "
            "stroke-width='2'/>")


def _dispatch_combine() -> str:
    left, middle, right, step = 30, 300, 710, 172
    parts = [text(left, 30, "dispatch: each token goes to the ranks of its experts", 15,
                  extra=svg.BOLD),
             text(right + 160, 30, "combine: the weighted sum comes home", 15, "end", svg.BOLD)]
    homes, sums, lines = {}, {}, []
    for rank in range(_RANKS):
        y = 52 + rank * step
        parts += _box(left, y, 150, 150, f"rank {rank}: tokens")
        parts += _box(right, y, 160, 150, f"rank {rank}: output")
        for index, token in enumerate(t for t, (home, _) in _TOKENS.items() if home == rank):
            row = y + 40 + index * 52
            parts += _cell(left + 20, row, token, token)
            weights = " + ".join(f"{weight:g} e{expert}" for expert, weight in _TOKENS[token][1])
            parts += _cell(right + 20, row, "Σ", token)
            parts.append(text(right + 20, row + 43, weights, 11))
            experts = ", ".join(str(expert) for expert in _experts_of(token))
            parts.append(text(left + 72, row + 18, f"→ {experts}", 12))
            homes[token] = (left + 115, row + 14)
            sums[token] = (right + 20, row + 14)
    for rank in range(_RANKS):
        y = 52 + rank * step
        parts += _box(middle, y, 290, 150, f"rank {rank}: experts")
        for local in range(_LOCAL):
            expert = rank * _LOCAL + local
            row = y + 36 + local * 54
            parts.append(text(middle + 22, row + 19, f"expert {expert}", 12))
            for slot, token in enumerate(_received_ll(expert)):
                x = middle + 100 + slot * (_CELL_W + 8)
                parts += _cell(x, row, token, token)
            for token in _received_ll(expert):
                lines.append(_curve(homes[token], (middle, row + 14), token))
                lines.append(_curve((middle + 290, row + 14), sums[token], token))
    return svg.picture(900, 52 + _RANKS * step, [*parts, *lines])


def _layout_ll() -> str:
    slots, step = _RANKS * _MOST_TOKENS, 142
    parts = [text(30, 30, "Low latency: TOKENS [L, R*M, H], one block of slots for each expert", 15,
                  extra=svg.BOLD)]
    for rank in range(_RANKS):
        y = 52 + rank * step
        parts += _box(30, y, 620, 126, f"rank {rank}")
        for slot in range(slots):
            parts.append(text(240 + slot * 60, y + 22, f"slot {slot}", 11, "middle"))
        parts.append(text(560, y + 22, "counter [L]", 11, "middle"))
        for local in range(_LOCAL):
            rows = _received_ll(rank * _LOCAL + local)
            top = y + 36 + local * 42
            parts.append(text(44, top + 19, f"local {local} (expert {rank * _LOCAL + local})"))
            for slot in range(slots):
                token = rows[slot] if slot < len(rows) else ""
                parts += _cell(240 + slot * 60 - _CELL_W / 2, top, token, token)
            parts += _number(560 - _CELL_W / 2, top, str(len(rows)))
    end = 52 + _RANKS * step
    parts += _notes(
        end, "Rows are packed from slot 0, by source rank, token, k. Ids and weights stay at",
        "home, where combine applies the weights. Dashed slots keep what they held.")
    return svg.picture(680, end + 36, parts)


def _layout_ht() -> str:
    step, columns = 206, (150, 290, 470)
    parts = [text(30, 30, "High throughput: one row for each token, whatever its experts here", 15,
                  extra=svg.BOLD)]
    for rank in range(_RANKS):
        y = 52 + rank * step
        rows = _received_ht(rank)
        parts += _box(30, y, 620, 190, f"rank {rank}")
        for x, name in zip(columns, ("TOKENS [n, H]", "TOPK_IDX [n, K]", "TOPK_WEIGHTS [n, K]")):
            parts.append(text(x, y + 22, name, 11))
        for index in range(_RANKS * _MOST_TOKENS):
            top = y + 34 + index * 38
            token = rows[index] if index < len(rows) else ""
            parts.append(text(44, top + 19, f"row {index}"))
            parts += _cell(columns[0], top, token or "0", token, 90)
            here = [(expert % _LOCAL, weight) for expert, weight in sorted(_TOKENS[token][1])
                    if expert // _LOCAL == rank] if token else []
            for k in range(_TOP_K):
                known = k < len(here)
                parts += _number(columns[1] + k * _CELL_W, top,
                                 str(here[k][0]) if known else "-1", not known)
                parts += _number(columns[2] + k * _CELL_W, top,
                                 f"{here[k][1]:g}" if known else "0", not known)
    end = 52 + _RANKS * step
    parts += _notes(
        end, "Rows are in the order of source rank and token. Ids are local and ascending,",
        "then -1. Rows behind the last one are 0, -1 and 0 (dashed).")
    return svg.picture(680, end + 36, parts)
