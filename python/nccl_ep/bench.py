"""Times dispatch and combine on the GPUs of this machine; shows files of such runs as a table or a picture.

A time is the mean of operations back to back in a CUDA graph, on the slowest rank. On the CPU stand-ins the same runs,
and its times mean nothing.
"""

from __future__ import annotations

import datetime
import importlib
import json
import pathlib
from typing import Any, NamedTuple, cast

from nccl_ep import testing
from nccl_ep.modes import Algorithm
from nccl_ep.requirement import require_torch

FORMAT = "nccl_ep bench"
MODES: dict[Algorithm, str] = {"ll": "low latency", "ht": "high throughput"}
_OPERATIONS = ("dispatch", "combine")


class Settings(NamedTuple):
    """What is measured; `sms` 0 leaves the number to the library."""

    modes: tuple[Algorithm, ...]
    tokens: tuple[int, ...]
    experts: int
    hidden: int
    top_k: int
    dtype: str
    sms: int
    repetitions: int


class Seen(NamedTuple):
    """What one rank measured: microseconds of dispatch and combine, or nothing where rows came back wrong."""

    device: str
    times: dict[tuple[str, int], tuple[float, float] | None]


def run(settings: Settings, ranks: int | None, stand_ins: bool, file: str | None) -> int:
    """Measures, prints the table and writes the file; 1 if rows came back wrong."""
    try:
        require_torch("python -m nccl_ep bench")
        if file:
            _check_writable(pathlib.Path(file))
        if ranks is None:
            ranks = (0 if stand_ins else testing.number_of_gpus()) or 2
        seen = testing.run(ranks, measure, settings, timeout=600, stand_ins=stand_ins)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error.__cause__, testing.InRank):
            raise
        raise SystemExit(f"bench: {error}") from None
    found = document(settings, seen)
    print(f"{ranks} ranks on {found['gpu']}; {settings.experts} experts, hidden {settings.hidden}, "
          f"top-{settings.top_k}, {settings.dtype}; microseconds\n")
    print(table({"": found}))
    if file:
        try:
            pathlib.Path(file).write_text(json.dumps(found, indent=1) + "\n")
        except OSError as error:  # such as on a disk that has filled up meanwhile
            raise SystemExit(f"bench: {error}") from None
    wrong = [f"{mode} {tokens}" for each in seen for (mode, tokens), times in each.times.items() if times is None]
    print(f"\nFAILED: wrong rows with {', '.join(dict.fromkeys(wrong))} tokens" if wrong else
          "\nPASSED: all rows came back")
    return int(bool(wrong))


def _check_writable(path: pathlib.Path) -> None:
    """Raises OSError with the path if it can neither be written nor made."""
    made = not path.exists()
    with path.open("ab"):
        pass
    if made:
        path.unlink()


def measure(rank: int, ranks: int, settings: Settings) -> Seen:
    """One rank's part."""
    import torch

    from nccl_ep import EpGroup
    from nccl_ep.tuning.measure import Workload

    device = ""
    times: dict[tuple[str, int], tuple[float, float] | None] = {}
    for mode in settings.modes:
        for tokens in settings.tokens:
            with EpGroup(settings.experts, settings.hidden, algorithm=mode, max_tokens_per_rank=tokens,
                         dtype=getattr(torch, settings.dtype), num_channels=settings.sms // 2) as group:
                load = Workload(group, tokens, settings.top_k)
                right = _comes_back(load, ranks, settings.experts)
                times[mode, tokens] = load.times(settings.repetitions) if right else None
                load.close()
                device = str(group.device)
    if device != "cpu":
        device = torch.cuda.get_device_name()
    return Seen(device, times)


def _comes_back(load: Any, ranks: int, num_experts: int) -> bool:
    """Whether each token comes back as often as it was sent: to each expert in low latency, else to each rank."""
    import torch

    ids = load.handle.topk_idx
    copies = torch.full((len(ids), 1), ids.shape[1], device=ids.device)
    if load.combine_weights is None:
        own = num_experts // ranks
        copies = (ids.unsqueeze(1) // own == torch.arange(ranks, device=ids.device).view(1, -1, 1)).any(2).sum(1, True)
    load.tokens.copy_(torch.arange(load.tokens.numel()).view(load.tokens.shape) % 15 + 1)  # exact in sums of any type
    load.dispatch()
    load.results.copy_(load.options["out"])
    load.combine()
    return bool((load.home == load.tokens * copies).all())


def document(settings: Settings, seen: list[Seen]) -> dict[str, Any]:
    """What a file says: the slowest rank's times."""
    import nccl_ep

    rows = []
    for key in seen[0].times:
        times = [each.times[key] for each in seen]
        known = [each for each in times if each is not None]
        if len(known) == len(times):
            dispatch, combine = (round(max(each[i] for each in known), 3) for i in range(2))
            rows.append({"mode": key[0], "tokens": key[1], "dispatch": dispatch, "combine": combine})
    device = "the CPU stand-ins" if seen[0].device == "cpu" else seen[0].device
    return {"format": FORMAT, "version": 1, "nccl_ep": nccl_ep.__version__,
            "date": datetime.date.today().isoformat(), "gpu": device, "ranks": len(seen),
            **{name: getattr(settings, name) for name in ("experts", "hidden", "top_k", "dtype", "sms")}, "rows": rows}


def show(files: list[str], picture: str | None) -> int:
    """The table of some files, or a picture of them."""
    found = {}
    for file in files:
        try:
            content = json.loads(pathlib.Path(file).read_text())
        except (OSError, ValueError) as error:
            raise SystemExit(f"bench: {file}: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise SystemExit(f"bench: {file}: not a file of `python -m nccl_ep bench --json`")
        name = pathlib.Path(file).stem
        found[file if name in found else name] = content
    try:
        if picture:
            draw(found, picture)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"bench: {error}") from None
    print(table(found))
    return 0


def _cells(found: dict[str, dict[str, Any]]) -> dict[tuple[str, int], dict[str, dict[str, float]]]:
    """By mode and number of tokens, by name of a run."""
    cells: dict[tuple[str, int], dict[str, dict[str, float]]] = {}
    for name, content in found.items():
        for row in content["rows"]:
            cells.setdefault((row["mode"], row["tokens"]), {})[name] = row
    order = list(MODES)
    return dict(sorted(cells.items(), key=lambda cell: (order.index(cast(Algorithm, cell[0][0])), cell[0][1])))


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row for each mode and number of tokens, two columns for each run."""
    heads = [f"{name} {operation}".strip() for name in found for operation in _OPERATIONS]
    lines = [["mode", "tokens", *heads]]
    for (mode, tokens), by_run in _cells(found).items():
        lines.append([mode, str(tokens), *(f"{by_run[name][operation]:.1f}" if name in by_run else ""
                                           for name in found for operation in _OPERATIONS)])
    return markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    """A table whose first line is its head; all but the first column are numbers."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rule = "|" + "|".join("-" * (width + 1) + ("-" if not i else ":") for i, width in enumerate(widths)) + "|"
    text = ["| " + " | ".join(word.rjust(width) if i else word.ljust(width)
                              for i, (word, width) in enumerate(zip(line, widths))) + " |" for line in lines]
    return "\n".join([text[0], rule, *text[1:]])


def draw(found: dict[str, dict[str, Any]], picture: str) -> None:
    """Microseconds over tokens, a panel for each mode."""
    panels: Panels = {}
    for (mode, tokens), by_run in _cells(found).items():
        for name, row in by_run.items():
            for operation in _OPERATIONS:
                lines = panels.setdefault(MODES[cast(Algorithm, mode)], {})
                lines.setdefault(f"{name} {operation}".strip(), []).append((tokens, row[operation]))
    draw_panels(panels, picture)


# By title and label: microseconds over tokens. The lines of a panel are pairs, of one colour each.
Panels = dict[str, dict[str, list[tuple[int, float]]]]


def draw_panels(panels: Panels, picture: str) -> None:
    """A picture of them by matplotlib; the file's ending names the format."""
    try:
        importlib.import_module("matplotlib").use("agg")
    except ImportError:
        raise ImportError("a picture needs matplotlib: pip install matplotlib") from None
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False)
    for (title, lines), panel in zip(panels.items(), axes[0]):
        for number, (label, points) in enumerate(lines.items()):
            panel.plot(*zip(*points), ("-", "--")[number % 2], marker="o", color=f"C{number // 2}", label=label)
        panel.set(title=title, xlabel="tokens of a rank", ylabel="microseconds", xscale="log", yscale="log")
        panel.legend()
    figure.tight_layout()
    figure.savefig(picture)
