"""Times of a dispatch and a combine of one group: on GPUs by CUDA graphs, else by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from nccl_ep.group import EpGroup
from nccl_ep.row_layout import RowLayout
from nccl_ep.runtime import new_event
from nccl_ep.scales import CastName

# Operations per graph: enough to hide the launch of the graph itself.
_IN_GRAPH = 8


class Workload:
    """The same tokens and routing for every candidate: K distinct random experts for each token."""

    def __init__(self, group: EpGroup, tokens: int, top_k: int, cast: CastName | None = None,
                 layout: RowLayout = "expert") -> None:
        random = torch.Generator().manual_seed(tokens + 7919 * group.rank)
        scores = torch.rand((tokens, group.num_experts), generator=random, dtype=torch.float32,
                            device="cpu")
        ids = scores.topk(top_k, dim=1).indices.to(group.device)
        self.handle = group.create_handle(ids)
        self.tokens = torch.zeros((tokens, group.hidden), dtype=group.dtype, device=group.device)
        self.weights = torch.ones((tokens, top_k), dtype=torch.float32, device=group.device)
        # Weights go along, or belong to the combine.
        along = group.algorithm == "ht" or layout == "rank"
        self.dispatch_weights = self.weights if along else None
        self.combine_weights = None if along else self.weights
        self.options: dict[str, Any] = {"cast": cast, "layout": layout}
        first = self.handle.dispatch(self.tokens, self.dispatch_weights, **self.options)
        self.outputs = {"out": first.tokens, "out_scales": first.scales}
        self.results = torch.zeros(first.tokens.shape, dtype=group.dtype, device=group.device)
        self.home = torch.empty_like(self.tokens)

    def dispatch(self) -> None:
        """One dispatch, into existing memory."""
        self.handle.dispatch(self.tokens, self.dispatch_weights, **self.options, **self.outputs)

    def combine(self) -> None:
        """One combine."""
        self.handle.combine(self.results, self.combine_weights, out=self.home)

    def times(self, repetitions: int) -> tuple[float, float]:
        """Microseconds of a dispatch and of a combine, each the mean of many back to back."""
        return self._time(self.dispatch, repetitions), self._time(self.combine, repetitions)

    def _time(self, operation: Callable[[], None], repetitions: int) -> float:
        operation()
        if self.tokens.device.type == "cpu":
            start = time.perf_counter()
            for _ in range(repetitions):
                operation()
            return (time.perf_counter() - start) / repetitions * 1e6
        return _time_on_gpu(operation, max(repetitions // _IN_GRAPH, 1))

    def close(self) -> None:
        """Frees the handle."""
        self.handle.close()


def _time_on_gpu(operation: Callable[[], None], replays: int) -> float:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_IN_GRAPH):
            operation()
    graph.replay()
    begin, end = (new_event(timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / (replays * _IN_GRAPH)
