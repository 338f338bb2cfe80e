"""`tune`: the best candidate for each operation and number of tokens, agreed on by all ranks."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nccl_ep.group import EpGroup
from nccl_ep.nccl_wrapper import NCCLLibrary
from nccl_ep.rendezvous import broadcast, collective_device, get_nccl_comm_from_group
from nccl_ep.runtime import Runtime
from nccl_ep.tuning.candidates import (OPERATIONS, Candidate, candidates, check_writable, document,
                                       in_force, write)
from nccl_ep.tuning.measure import Workload
from nccl_ep.types import NCCL_EP_AUTO

# Another choice than the library's own must be at least this much faster; otherwise noise decides.
_WORTH = 0.98
# On the CPU there is nothing to tune; two shapes show that everything else works.
_CPU_MULTIPROCESSORS = 8
_SECONDS_WITHOUT_PROGRESS = 2.0
_MOST_BYTES_OF_TEXT = 256


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
         algorithms: str | Sequence[str] = ("ll",), process_group: Any = None, num_sms: int = 0,
         repetitions: int = 64, progress: bool = True) -> dict[str, Any]:
    """Measures candidates on the real communicator and writes the best ones to `path`.

    For each power of two up to `max_tokens_per_rank`, all ranks dispatch and combine that many
    tokens with every candidate: blocks (up to `num_sms`), sending blocks, threads. The slowest
    rank's time counts, so all ranks choose the same. Returns the contents of the file.
    `algorithms` is one of "ll" and "ht", or several. Collective; uses torch.distributed. If rank 0
    cannot write the file, all ranks raise OSError, before anything is measured where possible.
    """
    algorithms = _checked(algorithms, shape)
    target = pathlib.Path(path)
    _on_first_rank(lambda: check_writable(target), path, process_group)
    library = NCCLLibrary()
    runtime = Runtime(library)
    with runtime.current():
        comm = get_nccl_comm_from_group(process_group, library)
    gpu, multiprocessors = _device(runtime)
    rank, ranks = library.ncclCommUserRank(comm), library.ncclCommCount(comm)
    sizes = [1 << power for power in range((shape.max_tokens_per_rank - 1).bit_length() + 1)]
    bar = _Progress(rank == 0 and progress)
    entries: list[dict[str, Any]] = []
    for algorithm in algorithms:
        bench = Bench(comm, algorithm, shape, sizes, repetitions)
        tried: list[Candidate | None] = [None, *candidates(algorithm, multiprocessors, num_sms)]
        # Warm-up run, discarded.
        bench.times(None)
        times = []
        for number, candidate in enumerate(tried):
            bar.show(algorithm, number, len(tried))
            contents = None
            if candidate is not None:
                # The entry of the largest number of tokens serves all smaller ones, too.
                both = [_entry(name, sizes[-1], candidate) for name in OPERATIONS[algorithm]]
                contents = document(gpu, ranks, both)
            times.append(bench.times(contents))
        agreed = _slowest(torch.tensor(times, dtype=torch.float64, device="cpu"), process_group)
        entries += _best(algorithm, sizes, tried, agreed)
        bar.show(algorithm, len(tried), len(tried))
    result = document(gpu, ranks, entries, **shape.facts(), nccl=library.ncclGetVersion())
    library.ncclCommDestroy(comm)
    _on_first_rank(lambda: write(target, result), path, process_group)
    return result


def _checked(algorithms: str | Sequence[str], shape: MoeShape) -> list[str]:
    """The names of the algorithms; ValueError for unknown ones or without tokens to measure."""
    names = [algorithms] if isinstance(algorithms, str) else list(algorithms)
    for name in names:
        if name not in OPERATIONS:
            raise ValueError(f"algorithms: must be 'll' or 'ht', not {name!r}")
    if shape.max_tokens_per_rank < 1:
        raise ValueError("max_tokens_per_rank: must be positive, but is "
                         f"{shape.max_tokens_per_rank}")
    return names


def _on_first_rank(action: Callable[[], None], path: str | os.PathLike[str],
                   process_group: Any) -> None:
    """Runs a file operation on rank 0; if it fails, every rank raises."""
    problem = ""
    if dist.get_rank(process_group) == 0:
        try:
            action()
        except OSError as error:
            problem = error.strerror or repr(error)
    shared = broadcast(problem.encode(), _MOST_BYTES_OF_TEXT, process_group, dist)
    if text := shared.rstrip(b"\0").decode(errors="replace"):
        raise OSError(f"{os.fspath(path)}: cannot be written: {text}")


def _device(runtime: Runtime) -> tuple[str, int]:
    """The GPU's name as the library compares it, and its number of multiprocessors."""
    if runtime.device.type == "cpu":
        return "CPU", _CPU_MULTIPROCESSORS
    properties = torch.cuda.get_device_properties(runtime.device)
    return properties.name, properties.multi_processor_count


@dataclasses.dataclass(frozen=True)
class Bench:
    """Settings shared by all candidates of an algorithm."""

    comm: Any
    algorithm: str
    shape: MoeShape
    sizes: list[int]
    repetitions: int

    def times(self, contents: dict[str, Any] | None) -> list[tuple[float, float]]:
        """This rank's times of dispatch and combine for each number of tokens, using this file."""
        shape = self.shape
        # Without a bound a handle knows its rows, so no time is spent on zeros for unused ones.
        bound = NCCL_EP_AUTO if self.algorithm == "ht" else self.sizes[-1]
        with in_force(contents):
            group = EpGroup(shape.num_experts, shape.hidden, algorithm=self.algorithm,
                            max_tokens_per_rank=bound, dtype=shape.dtype, comm=self.comm)
        with group:
            found = []
            for tokens in self.sizes:
                work = Workload(group, tokens, shape.top_k)
                found.append(work.times(self.repetitions))
                work.close()
            return found


def _entry(operation: str, tokens: int, candidate: Candidate | None,
           **facts: Any) -> dict[str, Any]:
    shape = {"default": True} if candidate is None else {
        "blocks": candidate.blocks, "threads": candidate.threads,
        "send_blocks": candidate.send_blocks}
    return {"operation": operation, "tokens": tokens, **shape, **facts}


def _slowest(times: torch.Tensor, process_group: Any) -> torch.Tensor:
    """The largest time of any rank; the same on all."""
    shared = times.to(collective_device(dist, process_group))
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=process_group)
    return shared.cpu()


def _best(algorithm: str, sizes: list[int], tried: list[Candidate | None],
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


class _Progress:
    """A progress line on stderr, shown only if the work takes longer than a moment."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted and sys.stderr.isatty()
        self._start = time.monotonic()

    def show(self, algorithm: str, done: int, total: int) -> None:
        """`done` of `total` candidates of an algorithm."""
        seconds = time.monotonic() - self._start
        if not self._wanted or seconds < _SECONDS_WITHOUT_PROGRESS:
            return
        filled = 30 * done // total
        bar = "#" * filled + "." * (30 - filled)
        end = "\n" if done == total else ""
        print(f"\rtuning {algorithm} [{bar}] {done}/{total}, {seconds:.0f} s", end=end,
              file=sys.stderr, flush=True)
