"""Times of a dispatch and a combine of one group: on GPUs by CUDA graphs, else by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from nccl_ep.group import EpGroup
from nccl_ep.runtime import new_event
from nccl_ep.tuning.candidates import Rows

# Operations per graph: enough to hide the launch of the graph itself.
_IN_GRAPH = 8


class Workload:
    """The same tokens and routing for every candidate: K distinct random experts for each token."""

    def __init__(self, group: EpGroup[Any], tokens: int, top_k: int, rows: Rows = Rows()) -> None:
        random = torch.Generator().manual_seed(tokens + 7919 * group.rank)
        scores = torch.rand((tokens, group.num_experts), generator=random, dtype=torch.float32,
                            device="cpu")
        ids = scores.topk(top_k, dim=1).indices.to(group.device)
        self.handle = group.create_handle(ids)
        self.tokens = torch.zeros((tokens, group.hidden), dtype=group.dtype, device=group.device)
        self.weights = torch.ones((tokens, top_k), dtype=torch.float32, device=group.device)
        # Weights go along, or belong to the combine.
        by_rank = rows.layout != "expert"
        along = group.algorithm == "ht" or by_rank
        self.dispatch_weights = self.weights if along else None
        self.combine_weights = None if along else self.weights
        self.options: dict[str, Any] = {"cast": rows.cast, "layout": "rank" if by_rank else "expert"}
        first = self.handle.dispatch(self.tokens, self.dispatch_weights, **self.options)
        out, self.results = first.tokens, torch.empty(first.tokens.shape, dtype=group.dtype, device=group.device)
        if rows.memory == "symmetric":
            out, self.results = (group.empty(each.shape, each.dtype) for each in (out, self.results))
        self.results.zero_()
        self.in_view = rows.layout == "view"
        self.options |= {"view": True} if self.in_view else {"out": out, "out_scales": first.scales}
        self.home = torch.empty_like(self.tokens)

    def dispatch(self) -> None:
        """One dispatch, into existing memory."""
        self.handle.dispatch(self.tokens, self.dispatch_weights, **self.options)

    def combine(self) -> None:
        """One combine."""
        self.handle.combine(self.results, self.combine_weights, out=self.home)

    def pair(self) -> None:
        """Both."""
        self.dispatch()
        self.combine()

    def times(self, repetitions: int) -> tuple[float, float]:
        """Microseconds of a dispatch and of a combine, each the mean of many back to back. For views, which live until
        the combine, twice those of a pair."""
        if self.in_view:
            pair = self._time(self.pair, repetitions)
            return pair, pair
        return self._time(self.dispatch, repetitions), self._time(self.combine, repetitions)

    def _time(self, operation: Callable[[], None], repetitions: int) -> float:
        operation()
        replays = max(repetitions // _IN_GRAPH, 1)
        if self.tokens.device.type == "cpu":  # where times mean nothing
            start = time.perf_counter()
            for _ in range(replays):
                operation()
            return (time.perf_counter() - start) / replays * 1e6
        return _time_on_gpu(operation, replays)

    def close(self) -> None:
        """Frees the handle and the memory of rows, which the next workload may need."""
        self.handle.close()
        del self.options, self.results


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
