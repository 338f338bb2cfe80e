#!/usr/bin/env python3
"""Times an MoE layer on EPAll2AllLayer step by step: the exchanges between ranks, and torch's work
on the rank of the experts.

    mpirun -np 4 python3 bench/layer.py [--deep-ep] [--json FILE]   or torchrun --nproc-per-node 4 ...

Rank i runs on GPU i and is timed by CUDA events; with the CPU stand-ins the times mean nothing.
Each step runs alone, after a barrier; the median of the slowest rank counts. "host us" is the time
that the host spends in a step, waits included.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "python"))
sys.path.append(str(ROOT / "python"))  # if the package is not installed

from nccl_ep import deep_ep  # noqa: E402
from nccl_ep.layers import EPAll2AllLayer, expand, rows  # noqa: E402
from start import finish, start  # noqa: E402

# GPU cycles during which launches queue up, so that only the GPU's own time is measured.
_HEAD_START = 3_000_000
_WARM_UP = 3
_FEW = 128  # tokens of low latency
_PAIRS = 20  # in a graph


@dataclasses.dataclass
class Step:
    """Something to time: what it runs, the bytes it moves on this rank, whether the host waits for
    the GPU in it, and how often a run does what the name says."""

    name: str
    run: Callable[[], Any]
    bytes: int = 0
    host_waits: bool = False
    times: int = 1


class Bench:
    """A layer after one exchange, whose parts the steps repeat."""

    def __init__(self, arguments: argparse.Namespace, rank: int, size: int, device: torch.device) -> None:
        self.device = device
        experts, top_k = arguments.experts, arguments.top_k
        self.experts = experts
        dtype = getattr(torch, arguments.dtype)
        self.few = min(arguments.tokens, _FEW)
        self.layer = EPAll2AllLayer(None, arguments.tokens, arguments.hidden, top_k, rank, experts, size, size,
                                    dtype=dtype, num_sm=arguments.num_sm, latency_tokens=self.few)
        random = torch.Generator().manual_seed(rank)
        scores = torch.rand((arguments.tokens, experts), generator=random)
        self.ids = scores.topk(top_k, dim=1).indices.to(device)
        self.weights = torch.rand((arguments.tokens, top_k), device=device)
        self.tokens = torch.randn((arguments.tokens, arguments.hidden), device=device).to(dtype)
        self.rows, self.factors, self.layout = self.layer.dispatch(self.tokens, self.ids, self.weights)
        self.received = self.layout.handle.dispatch(self.tokens, self.weights)

    def check(self) -> None:
        """Experts that only apply the weights: every token comes back times their sum."""
        results = self.rows * self.factors.unsqueeze(1).to(self.rows.dtype)
        output = self.layer.combine(results, self.layout)
        wanted = self.tokens.float() * self.weights.sum(dim=1, keepdim=True)
        torch.testing.assert_close(output.float(), wanted, rtol=5e-2, atol=5e-2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The whole layer around experts that do nothing."""
        rows, _, layout = self.layer.dispatch(tokens, self.ids, self.weights)
        return self.layer.combine(rows, layout)

    def forward_and_backward(self) -> None:
        """Forward, and the gradients of the tokens."""
        self.forward(self.tokens.detach().requires_grad_()).backward(self.tokens)

    def steps(self) -> list[Step]:
        """The steps of a forward pass in order, then the whole."""
        layer, layout = self.layer, self.layout
        handle, expansion = layout.handle, layout.expansion
        row = self.tokens[0].nbytes
        received, pairs = len(self.received.tokens), len(self.rows)
        by_expert = (self.received.topk_idx, pairs, layer.num_experts_per_rank)
        return [
            Step("count pairs", lambda: layer.count_pairs(self.ids)),
            Step("exchange routing", lambda: handle.group.create_handle(self.ids).num_recv_tokens,
                 host_waits=True),
            Step("dispatch", lambda: handle.dispatch(self.tokens, self.weights), received * row),
            Step("sort by expert", lambda: expand.by_expert(*by_expert)),
            Step("expand", lambda: expand.expand(self.received.tokens, expansion),
                 (received + pairs) * row),
            Step("reduce", lambda: expand.reduce(self.rows, expansion), (pairs + received) * row),
            Step("combine", lambda: handle.combine(self.received.tokens), received * row),
            Step("layer.dispatch", lambda: layer.dispatch(self.tokens, self.ids, self.weights),
                 host_waits=True),
            Step("layer.combine", lambda: layer.combine(self.rows, layout)),
            Step("forward", lambda: self.forward(self.tokens), host_waits=True),
            Step("forward and backward", self.forward_and_backward, host_waits=True),
        ]

    def calls_of(self, buffer: deep_ep.Buffer) -> list[Step]:
        """The same exchanges by an engine's calls."""
        experts = self.experts
        per_rank, _, per_expert, goes, _ = buffer.get_dispatch_layout(self.ids, experts)
        routing = {"topk_idx": self.ids, "topk_weights": self.weights, "num_tokens_per_rank": per_rank,
                   "num_tokens_per_expert": per_expert, "is_token_in_rank": goes}
        received, _, _, _, handle, _ = buffer.dispatch(self.tokens, **routing)

        return [
            Step("Buffer.get_dispatch_layout", lambda: buffer.get_dispatch_layout(self.ids, experts)),
            Step("Buffer.dispatch", lambda: buffer.dispatch(self.tokens, **routing), host_waits=True),
            Step("Buffer.dispatch(handle=)", lambda: buffer.dispatch(self.tokens, handle=handle)),
            Step("Buffer.combine", lambda: buffer.combine(received, handle)),
            *self.low_latency_of(buffer),
        ]

    def low_latency_of(self, buffer: deep_ep.Buffer) -> list[Step]:
        """Low latency pairs of the first tokens by an engine's calls, and by the layer."""
        most = self.few
        tokens, ids, weights = (each[:most].contiguous() for each in (self.tokens.bfloat16(), self.ids, self.weights))

        def pair(hook: bool) -> None:
            received, _, handle, _, receive = buffer.low_latency_dispatch(tokens, ids, most, self.experts,
                                                                          use_fp8=False, return_recv_hook=hook)
            receive and receive()
            receive = buffer.low_latency_combine(received, ids, weights, handle, return_recv_hook=hook)[2]
            receive and receive()

        @torch.no_grad()
        def by_layer() -> None:
            rows, _, layout = self.layer.dispatch(self.tokens[:most], ids, weights)
            self.layer.combine(rows, layout)

        steps = [Step(f"low latency, {most} tokens", lambda: pair(False)),
                 Step("the same with hooks", lambda: pair(True)), Step("the same by the layer", by_layer)]
        if self.device.type == "cuda":
            steps += [_captured("low latency in a graph", lambda: pair(False)),
                      _captured("by the layer in a graph", by_layer)]
        return steps

    def alternatives(self) -> list[Step]:
        """How rows are expanded and reduced where there is no Triton."""
        tokens, expansion = self.received.tokens, self.layout.expansion
        moved = (len(tokens) + len(self.rows)) * self.tokens[0].nbytes
        return [
            Step("expand: index_select", lambda: rows.spread_by_torch(tokens, expansion), moved),
            Step("reduce: embedding_bag", lambda: rows.add_up_by_torch(self.rows, expansion), moved),
        ]

    def medians(self, step: Step, iterations: int) -> tuple[float, float]:
        """Microseconds of a step on this rank, and of the host in it."""
        times = [self._once(step) for _ in range(_WARM_UP + iterations)]
        whole, host = zip(*times[_WARM_UP:])
        return statistics.median(whole) / step.times, statistics.median(host) / step.times

    def _once(self, step: Step) -> tuple[float, float]:
        if self.device.type == "cpu":
            self.layer.ep_barrier_all()
            return (_host_time(step),) * 2
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if not step.host_waits:
            torch.cuda._sleep(_HEAD_START)
        self.layer.ep_barrier_all()
        if step.host_waits:
            torch.cuda.synchronize()
        begin.record()
        host = _host_time(step)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3, host


def _captured(name: str, pair: Callable[[], None]) -> Step:
    pair()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_PAIRS):
            pair()
    return Step(name, graph.replay, times=_PAIRS)


def _host_time(step: Step) -> float:
    began = time.perf_counter()
    step.run()
    return (time.perf_counter() - began) * 1e6


def kernels_of(step: Step) -> int:
    """How many kernels, copies and fills a step enqueues; 0 on the CPU."""
    if not torch.cuda.is_available():
        return 0
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step.run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def measure(bench: Bench, steps: list[Step], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per step with the largest numbers of all ranks, the same on every rank."""
    records = []
    for step in steps:
        numbers = torch.tensor([*bench.medians(step, arguments.iterations), float(step.bytes)], dtype=torch.float64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        record = {"step": step.name, "microseconds": round(float(numbers[0]), 1),
                  "host_microseconds": round(float(numbers[1]), 1), "bytes": int(numbers[2])}
        if arguments.count_kernels:
            record["kernels"] = kernels_of(step)
        records.append(record)
    return records


def print_table(records: list[dict[str, Any]]) -> None:
    """Prints the records as a table."""
    print(f"{'step':26} {'us':>10} {'host us':>8} {'MB':>8} {'GB/s':>8}  kernels")
    for each in records:
        time_taken, moved = each["microseconds"], each["bytes"]
        size = f"{moved / 1e6:8.1f} {moved / time_taken / 1e3:8.1f}" if moved else " " * 17
        print(f"{each['step']:26} {time_taken:10.1f} {each['host_microseconds']:8.1f} {size}  "
              f"{each.get('kernels', '')}")


def parse_arguments() -> argparse.Namespace:
    """Sizes default to a training step on GPUs, and to something small on the CPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, text in (("tokens", "of each rank (4096)"), ("hidden", "elements of a token (7168)"),
                       ("top-k", "experts of a token (8)"), ("experts", "of all ranks (256)"),
                       ("iterations", "of each step (30)")):
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--num-sm", type=int, default=20, help="SMs of communication (20); 0: the library chooses")
    parser.add_argument("--deep-ep", action="store_true", help="also the calls of deep_ep.Buffer")
    parser.add_argument("--alternatives", action="store_true", help="also what expands and reduces without Triton")
    parser.add_argument("--count-kernels", action="store_true", help="with torch's profiler")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write the records there")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    rank, size, device = start()
    on_gpu = device.type == "cuda"
    defaults = ({"tokens": 4096, "hidden": 7168, "top_k": 8, "experts": 256, "iterations": 30}
                if on_gpu else
                {"tokens": 24, "hidden": 64, "top_k": 4, "experts": 4 * size, "iterations": 3})
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    bench = Bench(arguments, rank, size, device)
    bench.check()
    steps = bench.steps() + (bench.alternatives() if arguments.alternatives else [])
    buffer = None
    if arguments.deep_ep:
        buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
        steps += bench.calls_of(buffer)
    records = measure(bench, steps, arguments)
    shape = {name: getattr(arguments, name) for name in (*defaults, "dtype", "num_sm")}
    if rank == 0:
        name = torch.cuda.get_device_name() if on_gpu else "CPU"
        print(f"{size} x {name}, PyTorch {torch.__version__}: {shape}")
        print_table(records)
        if arguments.json:
            contents = {"device": name, "ranks": size, "torch": torch.__version__,
                        "nccl": bench.layout.handle.group.library.ncclGetVersion(), **shape,
                        "triton": on_gpu and rows.triton_kernels(device) is not None,
                        "rows": len(bench.rows), "received": len(bench.received.tokens),
                        "steps": records}
            arguments.json.write_text(json.dumps(contents, indent=1) + "\n")
    steps.clear()  # with them the graph of low latency pairs, which ends before its buffer
    if buffer is not None:
        buffer.destroy()
    bench.layer.finalize()
    finish(rank, f"{len(records)} steps timed on {size} ranks")


if __name__ == "__main__":
    main()
