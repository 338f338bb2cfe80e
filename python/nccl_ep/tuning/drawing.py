"""What was measured, as a table or a picture."""

from __future__ import annotations

import os
from typing import Any

from nccl_ep.bench import Panels, draw_panels, markdown
from nccl_ep.tuning.files import measured


def show(found: dict[str, Any], picture: str | os.PathLike[str] | None = None) -> str:
    """A Markdown table of what `tune` or `retune` returned, or of a file's part; `picture` names a file for one by
    matplotlib, where that is installed: a panel for each operation, the library's own choice and the best one over
    tokens."""
    lines = [["operation", "rows", "tokens", "own, us", "best, us", "choice"]]
    panels: Panels = {}
    for entry in measured(found):
        rows, own, best = _rows(entry), entry["default_microseconds"], entry["microseconds"]
        lines.append([entry["operation"], rows, str(entry["tokens"]), f"{own:.1f}", f"{best:.1f}", words(entry)])
        panel = panels.setdefault(entry["operation"], {})
        for label, time in (("best", best), ("own", own)):
            panel.setdefault(f"{rows} {label}", []).append((entry["tokens"], time))
    table = markdown(lines)
    try:
        if picture is not None:
            draw_panels(panels, os.fspath(picture))
    except ImportError as error:
        return f"{table}\n\n{error}"
    return table


def _rows(entry: dict[str, Any]) -> str:
    size = [f"{entry['row_bytes']} bytes"] if "row_bytes" in entry else []
    return ", ".join([*size, *(entry[name] for name in ("layout", "memory") if name in entry)]) or "all"


def words(entry: dict[str, Any]) -> str:
    """What was chosen."""
    if "default" in entry:
        return "the library's own"
    shape = ["{blocks} blocks of {threads}, {send_blocks} send".format(**entry)] if "blocks" in entry else []
    return ", ".join([*([entry["variant"]] if "variant" in entry else []), *shape])
