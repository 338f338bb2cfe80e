"""`tune`: the best candidate for each operation and number of tokens, agreed on by all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nccl_ep.arguments import integer, require_dtype, require_group
from nccl_ep.choices import Choice
from nccl_ep.group import ROW_TYPES, EpGroup
from nccl_ep.modes import Algorithm
from nccl_ep.runtime import Runtime
from nccl_ep.tuning.candidates import OPERATIONS, Pair, Rows, candidates, tried
from nccl_ep.tuning.files import CONDITIONS, check_writable, document, in_force, write
from nccl_ep.tuning.measure import Workload
from nccl_ep.tuning.progress import Progress
from nccl_ep.tuning.ranks import Ranks
from nccl_ep.types import NCCL_EP_AUTO, ncclComm_t

# Another choice than the library's own must be at least this much faster; otherwise noise decides.
_WORTH = 0.98
# On the CPU there is nothing to tune; a few shapes show that everything else works.
_CPU_MULTIPROCESSORS = 1


@dataclasses.dataclass(frozen=True)
class MoeShape:
    """The communication that a model's experts need."""

    num_experts: int
    hidden: int
    top_k: int
    max_tokens_per_rank: int
    dtype: torch.dtype = torch.bfloat16

    def facts(self) -> dict[str, Any]:
        """A description for readers of a tuning file."""
        return {"num_experts": self.num_experts, "hidden": self.hidden, "top_k": self.top_k,
                "dtype": str(self.dtype).removeprefix("torch.")}


def tune(path: str | os.PathLike[str], shape: MoeShape, *,
         algorithms: Algorithm | Sequence[Algorithm] = ("ll",), rows: Rows | Sequence[Rows] = (Rows(),),
         exact: bool = False, process_group: Any = None, num_sms: int = 0, repetitions: int = 64,
         progress: bool = True) -> dict[str, Any]:
    """Measures candidates on the real communicator and writes the best ones to `path`.

    For each power of two up to `max_tokens_per_rank`, all ranks dispatch and combine that many
    tokens with every candidate: blocks (up to `num_sms`), sending blocks, threads; where `rows` are
    in symmetric memory also `ht.ring` beside `ht.direct` and `ht.pull`, with `exact` also
    `ll.exact`, which changes the last bits of sums. The slowest rank's time counts, so all ranks
    choose the same. Returns the contents of the file.
    `algorithms` is one of "ll" and "ht", or several, and so with `rows`, of which each algorithm
    takes those that it has. `process_group` is what `EpGroup` takes as `comm`: a torch.distributed
    group, None for all processes, or an ncclComm_t. Collective. If rank 0 cannot write the file,
    all ranks raise OSError, before anything is measured where possible.
    """
    names = _checked(algorithms, shape)
    # Plain ones first: what was found for them holds for all others that have nothing better.
    all_rows = [rows] if isinstance(rows, Rows) else sorted(rows, key=lambda each: each != Rows())
    num_sms, repetitions = integer("num_sms", num_sms), integer("repetitions", repetitions, 1)
    if not isinstance(process_group, ncclComm_t):
        require_group("process_group", process_group)
    if not any(each.exist_in(algorithm) for each in all_rows for algorithm in names):
        raise ValueError(f"rows: none of them exists in {' or '.join(names)}")
    target = pathlib.Path(path)
    ranks = Ranks(process_group)
    _on_first(ranks, lambda: check_writable(target), path)
    gpu, multiprocessors = device_facts(ranks.runtime)
    sizes = sizes_up_to(shape.max_tokens_per_rank)
    entries: list[dict[str, Any]] = []
    for algorithm in names:
        shapes = candidates(algorithm, multiprocessors, num_sms)
        for each in filter(lambda each: each.exist_in(algorithm), all_rows):
            pairs = tried(algorithm, shapes, each, exact and shape.top_k <= ranks.size)
            known = document(gpu, ranks.size, [entry for entry in entries if "row_bytes" not in entry])
            with in_force(known), _measured_group(shape, algorithm, each, ranks.comm) as group:
                bar = Progress(ranks.rank == 0 and progress, algorithm, len(pairs))
                found = search(group, (sizes, shape.top_k, each), pairs, repetitions, bar)
            entries += map(without_conditions, found) if each == Rows() else found
    result = document(gpu, ranks.size, entries, **shape.facts(), nccl=ranks.library.ncclGetVersion())
    _on_first(ranks, lambda: write(target, result), path)
    ranks.close()
    return result


@contextlib.contextmanager
def _measured_group(shape: MoeShape, algorithm: Algorithm, rows: Rows, comm: Any) -> Iterator[EpGroup[Any]]:
    """A group for such rows."""
    sizes = sizes_up_to(shape.max_tokens_per_rank)
    # Without a bound a handle knows its rows, so no time is spent on zeros for unused ones.
    bound = NCCL_EP_AUTO if algorithm == "ht" else sizes[-1]
    with EpGroup(shape.num_experts, shape.hidden, algorithm=algorithm, max_tokens_per_rank=bound, dtype=shape.dtype,
                 comm=comm) as group:
        if rows.memory == "symmetric":
            row = shape.hidden * shape.dtype.itemsize
            group.heap((2 * group.world_size * sizes[-1] + 64) * row + (1 << 20))
        yield group


def _on_first(ranks: Ranks, action: Callable[[], None], path: str | os.PathLike[str]) -> None:
    """`Ranks.on_first`, of which all ranks learn: so they can give up the communicator together."""
    try:
        ranks.on_first(action, path)
    except OSError:
        ranks.close()
        raise


def search(group: EpGroup[Any], work: tuple[list[int], int, Rows], pairs: list[Pair], repetitions: int,
           bar: Progress | None = None) -> list[dict[str, Any]]:
    """The best of the `pairs` for so many tokens, top-k and rows, on a group that chooses nothing else.
    Collective."""
    sizes, _, rows = work
    operations = OPERATIONS[group.algorithm]
    times = []
    try:
        _times(group, work, 1)  # warm-up
        for pair in pairs:
            for operation, choice in zip(operations, pair):
                group.set_choice(operation, choice)
            times.append(_times(group, work, repetitions))
            if bar is not None:
                bar.step()
    finally:
        for operation in operations:
            group.set_choice(operation, None)
        if bar is not None:
            bar.close()
    agreed = Ranks(group.comm).slowest(torch.tensor(times, dtype=torch.float64, device="cpu"))
    conditions = [_conditions(group, rows, dispatches) for dispatches in (True, False)]
    return best(group.algorithm, sizes, pairs, agreed, conditions)


def _times(group: EpGroup[Any], work: tuple[list[int], int, Rows], repetitions: int) -> list[tuple[float, float]]:
    """This rank's times of dispatch and combine for each number of tokens, the last bounded by the group's."""
    sizes, top_k, rows = work
    found = []
    for tokens in sizes:
        load = Workload(group, min(tokens, group.max_tokens_per_rank or tokens), top_k, rows)
        found.append(load.times(repetitions))
        load.close()
    return found


def _conditions(group: EpGroup[Any], rows: Rows, dispatches: bool) -> dict[str, Any]:
    """What a choice for such rows depends on."""
    width = 1 if rows.cast is not None and dispatches else group.dtype.itemsize
    name = "layout" if group.algorithm == "ll" else "memory"
    return {"row_bytes": group.hidden * width, name: getattr(rows, name)}


def without_conditions(entry: dict[str, Any]) -> dict[str, Any]:
    """A launch shape of plain rows, which is for all."""
    return {name: each for name, each in entry.items() if name not in CONDITIONS or "variant" in entry}


def sizes_up_to(most: int) -> list[int]:
    """The powers of two up to the first that is not below `most`."""
    return [1 << power for power in range((most - 1).bit_length() + 1)]


def _checked(algorithms: Algorithm | Sequence[Algorithm], shape: MoeShape) -> list[Algorithm]:
    """The names of the algorithms; raises for unknown ones and for shapes without tokens."""
    if not isinstance(shape, MoeShape):
        raise TypeError(f"shape: must be a MoeShape, not {type(shape).__name__}")
    names: list[Any] = [algorithms] if isinstance(algorithms, str) else list(algorithms)
    for name in names:
        if name not in OPERATIONS:
            raise ValueError(f"algorithms: must be 'll' or 'ht', not {name!r}")
    for field in ("num_experts", "hidden", "top_k", "max_tokens_per_rank"):
        value = integer(field, getattr(shape, field), least=-1)
        if value < 1:
            raise ValueError(f"{field}: must be positive, but is {value}")
    if shape.top_k > shape.num_experts:
        raise ValueError(f"top_k: must be at most num_experts ({shape.num_experts}), but is {shape.top_k}")
    require_dtype("dtype", shape.dtype, ROW_TYPES)
    return names


def device_facts(runtime: Runtime) -> tuple[str, int]:
    """The GPU's name as the library compares it, and its number of multiprocessors."""
    if runtime.device.type == "cpu":
        return "CPU", _CPU_MULTIPROCESSORS
    properties = torch.cuda.get_device_properties(runtime.device)
    return properties.name, properties.multi_processor_count


def entry_of(choice: Choice | None) -> dict[str, Any]:
    """What a file says of a choice; nothing of what it leaves to the library."""
    if choice is None:
        return {"default": True}
    shape = {"blocks": choice.blocks, "threads": choice.threads, "send_blocks": choice.send_blocks}
    return ({"variant": choice.variant} if choice.variant else {}) | (shape if choice.blocks else {})


def best(algorithm: Algorithm, sizes: list[int], pairs: list[Pair], times: torch.Tensor,
         conditions: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """The entries of an algorithm; `times` [candidates, sizes, 2] has the library's own first. `conditions` are those
    of dispatch and combine."""
    entries = []
    for column, operation in enumerate(OPERATIONS[algorithm]):
        choices = [pair[column] for pair in pairs]
        of_operation = times[:, :, column].clone()
        if algorithm == "ll":
            _agree(choices, of_operation)
        for row, tokens in enumerate(sizes):
            of_candidates = of_operation[:, row]
            at = int(of_candidates.argmin())
            if of_candidates[at] > _WORTH * of_candidates[0]:
                at = 0
            entries.append({"operation": operation, "tokens": tokens,
                            **(conditions[column] if conditions else {}), **entry_of(choices[at]),
                            "microseconds": round(float(of_candidates[at]), 2),
                            "default_microseconds": round(float(times[0, row, column]), 2)})
    return entries


def _agree(choices: list[Choice | None], times: torch.Tensor) -> None:
    """Leaves either exact sums or the group's own, the better over all numbers of tokens: they are the same on all
    ranks, which may have different numbers."""
    are_exact = torch.tensor([choice is not None and choice.variant == "ll.exact" for choice in choices],
                            device="cpu")
    if bool(are_exact.any()):
        exact, own = (times[which].amin(dim=0).log().mean().exp() for which in (are_exact, ~are_exact))
        times[~are_exact if exact < _WORTH * own else are_exact] = torch.inf
