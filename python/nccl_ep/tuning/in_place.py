"""`retune`: measures on a group that exists, which then runs its operations by what was best."""

from __future__ import annotations

from typing import Any, Literal

from nccl_ep.arguments import integer
from nccl_ep.choices import Choice, OperationName, Query, Selector
from nccl_ep.group import EpGroup
from nccl_ep.scales import CastName
from nccl_ep.tuning.candidates import OPERATIONS, Rows, candidates, tried
from nccl_ep.tuning.files import document
from nccl_ep.tuning.search import device_facts, search, sizes_up_to

_Sizes = list[tuple[int, "Choice | None"]]


class Tuned:
    """A selector: what was measured, where the one `before` it chooses nothing."""

    def __init__(self, before: Selector | None) -> None:
        self.before = before
        self.found: dict[tuple[OperationName, int, bool | None], _Sizes] = {}

    def __call__(self, query: Query) -> Choice | None:
        if self.before is not None and (choice := self.before(query)) is not None:
            return choice
        symmetric = None if query.operation.startswith("ll") else query.symmetric
        sizes = self.found.get((query.operation, query.row_bytes, symmetric), [])
        found = next((choice for tokens, choice in sizes if tokens >= query.tokens), None)
        # All have the same, as low latency sums alike on ranks with different numbers of tokens.
        variant = sizes[-1][1].variant if symmetric is None and sizes and sizes[-1][1] else None
        return Choice(variant) if found is None and variant else found

    def learn(self, entries: list[dict[str, Any]]) -> None:
        """Replaces what it knows of rows of the same size and memory."""
        new: dict[tuple[OperationName, int, bool | None], _Sizes] = {}
        for entry in entries:
            choice = None if "default" in entry else Choice(
                entry.get("variant"), *(entry.get(name, 0) for name in ("blocks", "send_blocks", "threads")))
            symmetric = entry["memory"] == "symmetric" if "memory" in entry else None
            new.setdefault((entry["operation"], entry["row_bytes"], symmetric), []).append((entry["tokens"], choice))
        self.found.update({key: sorted(sizes, key=lambda each: each[0])
                           for key, sizes in new.items()})


def retune(group: EpGroup[Any], top_k: int, max_tokens: int = 0, *, cast: CastName | None = None,
           layout: Literal["expert", "rank", "view"] = "expert",
           memory: Literal["plain", "symmetric"] = "plain", exact: bool = False, num_sms: int = 0,
           repetitions: int = 64) -> dict[str, Any]:
    """Measures candidates for up to `max_tokens` (0: the group's bound), as `tune` does, and lets
    the group choose by them from now on: for rows of this size, cast or as they are, in this
    memory, rounded up to a power of two of tokens. A selector and choices of the caller's come
    first. Symmetric memory is of the group's heap.

    Returns what a tuning file has, for `write`. Collective; nothing else uses the group meanwhile.
    """
    most = integer("max_tokens", max_tokens) or group.max_tokens_per_rank
    top_k = integer("top_k", top_k, 1, group.num_experts)
    num_sms, repetitions = integer("num_sms", num_sms), integer("repetitions", repetitions, 1)
    if most == 0:
        raise ValueError("max_tokens: must be positive, as the group has no bound")
    rows = Rows(cast, layout, memory)
    if not rows.exist_in(group.algorithm):
        raise ValueError(f"{'layout' if group.algorithm == 'ht' else 'memory'}: is not of groups "
                         f"{group.algorithm!r}")
    gpu, multiprocessors = device_facts(group.runtime)
    bound = min(each for each in (num_sms, 2 * group.num_channels, multiprocessors) if each > 0)
    pairs = tried(group.algorithm, candidates(group.algorithm, bound, 0), rows, exact and top_k <= group.world_size)
    before, set_before = group.selector, dict(group.choices)
    group.set_selector(None)
    try:
        found = search(group, (sizes_up_to(most), top_k, rows), pairs, repetitions)
    finally:
        for operation in OPERATIONS[group.algorithm]:
            group.set_choice(operation, set_before.get(operation))
        group.set_selector(before)
    tuned = before if isinstance(before, Tuned) else Tuned(before)
    tuned.learn(found)
    group.set_selector(tuned)
    return document(gpu, group.world_size, found, num_experts=group.num_experts, hidden=group.hidden,
                    top_k=top_k, cast=cast)
