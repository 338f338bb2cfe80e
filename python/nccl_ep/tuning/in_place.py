"""`retune`: measures on a group that exists, which then runs its operations by what was best."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from nccl_ep.arguments import integer
from nccl_ep.choices import Choice, OperationName, Query, Selector
from nccl_ep.group import EpGroup
from nccl_ep.row_layout import RowLayout
from nccl_ep.scales import CastName
from nccl_ep.tuning.candidates import OPERATIONS, Candidate, candidates, document
from nccl_ep.tuning.measure import Workload
from nccl_ep.tuning.ranks import Ranks
from nccl_ep.tuning.search import best, device_facts, sizes_up_to


@dataclasses.dataclass(frozen=True)
class Rows:
    """How tokens travel: cast, or as they are; rank-major, or not."""

    cast: CastName | None = None
    layout: RowLayout = "expert"


class Tuned:
    """A selector: what was measured, where the one `before` it chooses nothing."""

    def __init__(self, before: Selector | None) -> None:
        self.before = before
        self.found: dict[tuple[OperationName, int], list[tuple[int, Choice | None]]] = {}

    def __call__(self, query: Query) -> Choice | None:
        if self.before is not None and (choice := self.before(query)) is not None:
            return choice
        sizes = self.found.get((query.operation, query.row_bytes), ())
        return next((choice for tokens, choice in sizes if tokens >= query.tokens), None)

    def learn(self, entries: list[dict[str, Any]]) -> None:
        """Replaces what it knows of rows of the same size."""
        new: dict[tuple[OperationName, int], list[tuple[int, Choice | None]]] = {}
        for entry in entries:
            choice = None if "default" in entry else Choice(
                entry.get("variant"), entry["blocks"], entry["send_blocks"], entry["threads"])
            key = entry["operation"], entry["row_bytes"]
            new.setdefault(key, []).append((entry["tokens"], choice))
        self.found.update({key: sorted(sizes, key=lambda each: each[0])
                           for key, sizes in new.items()})


def retune(group: EpGroup[Any], top_k: int, max_tokens: int = 0, *, cast: CastName | None = None,
           layout: RowLayout = "expert", num_sms: int = 0, repetitions: int = 64) -> dict[str, Any]:
    """Measures candidates for up to `max_tokens` (0: the group's bound), as `tune` does, and lets
    the group choose by them from now on: for rows of this size, cast or as they are, rounded up to
    a power of two of tokens. A selector and choices of the caller's come first.

    Returns what a tuning file has, for `write`; only rows that are not cast belong into one.
    Collective; nothing else uses the group meanwhile.
    """
    most = integer("max_tokens", max_tokens) or group.max_tokens_per_rank
    if most == 0:
        raise ValueError("max_tokens: must be positive, as the group has no bound")
    rows = Rows(cast, layout)
    sizes, ranks = sizes_up_to(most), Ranks(group.comm)
    gpu, multiprocessors = device_facts(group.runtime)
    bound = min(each for each in (num_sms, 2 * group.num_channels, multiprocessors) if each > 0)
    tried: list[Candidate | None] = [None, *candidates(group.algorithm, bound, 0)]
    before, set_before = group.selector, dict(group.choices)
    group.set_selector(None)
    try:
        _times(group, sizes, (top_k, rows), 1)  # warm-up
        times = [_with(group, candidate, sizes, (top_k, rows), repetitions) for candidate in tried]
    finally:
        for operation in OPERATIONS[group.algorithm]:
            group.set_choice(operation, set_before.get(operation))
        group.set_selector(before)
    agreed = ranks.slowest(torch.tensor(times, dtype=torch.float64, device="cpu"))
    entries = best(group.algorithm, sizes, tried, agreed)
    width = 1 if cast is not None else group.dtype.itemsize
    for entry in entries:
        dispatches = entry["operation"].endswith("dispatch")
        entry["row_bytes"] = group.hidden * (width if dispatches else group.dtype.itemsize)
    tuned = before if isinstance(before, Tuned) else Tuned(before)
    tuned.learn(entries)
    group.set_selector(tuned)
    return document(gpu, ranks.size, entries, num_experts=group.num_experts, hidden=group.hidden,
                    top_k=top_k, cast=cast, layout=layout)


def _with(group: EpGroup[Any], candidate: Candidate | None, sizes: list[int],
          work: tuple[int, Rows], repetitions: int) -> list[tuple[float, float]]:
    choice = None if candidate is None else Choice(
        None, candidate.blocks, candidate.send_blocks, candidate.threads)
    for operation in OPERATIONS[group.algorithm]:
        group.set_choice(operation, choice)
    return _times(group, sizes, work, repetitions)


def _times(group: EpGroup[Any], sizes: list[int], work: tuple[int, Rows],
           repetitions: int) -> list[tuple[float, float]]:
    top_k, rows = work
    found = []
    for tokens in sizes:
        load = Workload(group, tokens, top_k, rows.cast, rows.layout)
        found.append(load.times(repetitions))
        load.close()
    return found
