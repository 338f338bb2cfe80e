"""`tune`: the best candidate for each operation and number of tokens, agreed on by all ranks."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nccl_ep.arguments import integer, require_dtype, require_group
from nccl_ep.group import ROW_TYPES, EpGroup
from nccl_ep.modes import Algorithm
from nccl_ep.runtime import Runtime
from nccl_ep.tuning.candidates import (OPERATIONS, Candidate, candidates, check_writable, document,
                                       in_force, write)
from nccl_ep.tuning.measure import Workload
from nccl_ep.tuning.progress import Progress
from nccl_ep.tuning.ranks import Ranks
from nccl_ep.types import NCCL_EP_AUTO, ncclComm_t

# Another choice than the library's own must be at least this much faster; otherwise noise decides.
_WORTH = 0.98
# On the CPU there is nothing to tune; two shapes show that everything else works.
_CPU_MULTIPROCESSORS = 8


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
         algorithms: Algorithm | Sequence[Algorithm] = ("ll",), process_group: Any = None,
         num_sms: int = 0, repetitions: int = 64, progress: bool = True) -> dict[str, Any]:
    """Measures candidates on the real communicator and writes the best ones to `path`.

    For each power of two up to `max_tokens_per_rank`, all ranks dispatch and combine that many
    tokens with every candidate: blocks (up to `num_sms`), sending blocks, threads. The slowest
    rank's time counts, so all ranks choose the same. Returns the contents of the file.
    `algorithms` is one of "ll" and "ht", or several. `process_group` is what `EpGroup` takes as
    `comm`: a torch.distributed group, None for all processes, or an ncclComm_t. Collective. If
    rank 0 cannot write the file, all ranks raise OSError, before anything is measured where
    possible.
    """
    names = _checked(algorithms, shape)
    num_sms, repetitions = integer("num_sms", num_sms), integer("repetitions", repetitions, 1)
    if not isinstance(process_group, ncclComm_t):
        require_group("process_group", process_group)
    target = pathlib.Path(path)
    ranks = Ranks(process_group)
    _on_first(ranks, lambda: check_writable(target), path)
    gpu, multiprocessors = device_facts(ranks.runtime)
    entries: list[dict[str, Any]] = []
    for algorithm in names:
        bench = Bench(ranks.comm, algorithm, shape, sizes_up_to(shape.max_tokens_per_rank), repetitions)
        tried: list[Candidate | None] = [None, *candidates(algorithm, multiprocessors, num_sms)]
        bar = Progress(ranks.rank == 0 and progress, algorithm, len(tried))
        entries += _measured(bench, tried, (gpu, ranks), bar)
    result = document(gpu, ranks.size, entries, **shape.facts(), nccl=ranks.library.ncclGetVersion())
    _on_first(ranks, lambda: write(target, result), path)
    ranks.close()
    return result


def _on_first(ranks: Ranks, action: Callable[[], None], path: str | os.PathLike[str]) -> None:
    """`Ranks.on_first`, of which all ranks learn: so they can give up the communicator together."""
    try:
        ranks.on_first(action, path)
    except OSError:
        ranks.close()
        raise


def _measured(bench: Bench, tried: list[Candidate | None], place: tuple[str, Ranks],
              bar: Progress) -> list[dict[str, Any]]:
    """The entries of one algorithm, measured on a GPU of this name by these ranks."""
    gpu, ranks = place

    def contents(candidate: Candidate | None) -> dict[str, Any]:
        # The entry of the largest number of tokens serves all smaller ones, too.
        both = [] if candidate is None else [_entry(name, bench.sizes[-1], candidate)
                                             for name in OPERATIONS[bench.algorithm]]
        return document(gpu, ranks.size, both, live=True)

    times = []
    try:
        with in_force(contents(None)) as path, bench.group() as group:
            # Warm-up run, discarded.
            bench.times(group)
            for candidate in tried:
                write(path, contents(candidate))
                times.append(bench.times(group))
                bar.step()
    finally:
        bar.close()
    agreed = ranks.slowest(torch.tensor(times, dtype=torch.float64, device="cpu"))
    return best(bench.algorithm, bench.sizes, tried, agreed)


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
    require_dtype("dtype", shape.dtype, ROW_TYPES)
    return names


def device_facts(runtime: Runtime) -> tuple[str, int]:
    """The GPU's name as the library compares it, and its number of multiprocessors."""
    if runtime.device.type == "cpu":
        return "CPU", _CPU_MULTIPROCESSORS
    properties = torch.cuda.get_device_properties(runtime.device)
    return properties.name, properties.multi_processor_count


@dataclasses.dataclass(frozen=True)
class Bench:
    """Settings shared by all candidates of an algorithm."""

    comm: Any
    algorithm: Algorithm
    shape: MoeShape
    sizes: list[int]
    repetitions: int

    def group(self) -> EpGroup:
        """The group that measures all candidates."""
        # Without a bound a handle knows its rows, so no time is spent on zeros for unused ones.
        bound = NCCL_EP_AUTO if self.algorithm == "ht" else self.sizes[-1]
        return EpGroup(self.shape.num_experts, self.shape.hidden, algorithm=self.algorithm,
                       max_tokens_per_rank=bound, dtype=self.shape.dtype, comm=self.comm)

    def times(self, group: EpGroup) -> list[tuple[float, float]]:
        """This rank's times of dispatch and combine for each number of tokens."""
        found = []
        for tokens in self.sizes:
            work = Workload(group, tokens, self.shape.top_k)
            found.append(work.times(self.repetitions))
            work.close()
        return found


def _entry(operation: str, tokens: int, candidate: Candidate | None,
           **facts: Any) -> dict[str, Any]:
    shape: dict[str, Any] = {"default": True} if candidate is None else {
        "blocks": candidate.blocks, "threads": candidate.threads,
        "send_blocks": candidate.send_blocks}
    return {"operation": operation, "tokens": tokens, **shape, **facts}


def best(algorithm: Algorithm, sizes: list[int], tried: list[Candidate | None],
          times: torch.Tensor) -> list[dict[str, Any]]:
    """The entries of an algorithm; `times` [candidates, sizes, 2] has the library's own first."""
    entries = []
    for column, operation in enumerate(OPERATIONS[algorithm]):
        for row, tokens in enumerate(sizes):
            of_candidates = times[:, row, column]
            best = int(of_candidates.argmin())
            if of_candidates[best] > _WORTH * of_candidates[0]:
                best = 0
            entries.append(_entry(operation, tokens, tried[best],
                                  microseconds=round(float(of_candidates[best]), 2),
                                  default_microseconds=round(float(of_candidates[0]), 2)))
    return entries
