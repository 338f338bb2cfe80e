"""A program for NVIDIA's nccl.ep package, over this project's library and the CPU stand-ins, which are preloaded: LL
expert-major and rank-major, HT flat and expert-major, both passes, a budget that drops, refusals.

Its ranks are forked. Each token of a rank goes to the experts `rank + k + 1`, whose ranks return it as it is, so that a
sum is the token times the weights, or the number of ranks. Ends with the line `N passed, N failed`, or says why it
skipped everything.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import traceback

RANKS, EXPERTS, TOKENS, TOP_K, HIDDEN = 2, 4, 3, 2, 64
LOCAL, ROWS = EXPERTS // RANKS, RANKS * TOKENS
SKIPPED, INVALID_ARGUMENT = 77, 4

try:
    import nccl.core
    import nccl.ep as ep
    from nccl.core.typing import NcclDataType
except ImportError as error:
    print(f"1 skipped: no nccl.ep package here ({error})\n0 passed, 0 failed")
    sys.exit(SKIPPED)

cuda = ctypes.CDLL(None)  # the stand-ins
cuda.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
cuda.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
KINDS = {"f": NcclDataType.FLOAT32, "i": NcclDataType.INT32, "q": NcclDataType.INT64}


class Memory:
    """Numbers of one kind on the device, and their descriptor; -9 until they are written."""

    def __init__(self, kind, *shape, numbers=None):
        count = 1
        for extent in shape:
            count *= extent
        self.format, address = f"<{count}{kind}", ctypes.c_void_p()
        assert cuda.cudaMalloc(ctypes.byref(address), struct.calcsize(self.format)) == 0
        self.tensor = ep.Tensor(address.value, dtype=KINDS[kind], shape=shape)
        self.write(numbers or [-9] * count)

    def write(self, numbers):
        data = struct.pack(self.format, *numbers)
        assert cuda.cudaMemcpy(self.tensor.data, data, len(data), 1) == 0

    def read(self):
        assert cuda.cudaStreamSynchronize(None) == 0
        data = ctypes.create_string_buffer(struct.calcsize(self.format))
        assert cuda.cudaMemcpy(data, self.tensor.data, len(data), 2) == 0
        return list(struct.unpack(self.format, data.raw))


class Rank:
    def __init__(self, number, unique_id):
        self.number, self.passed = number, 0
        self.comm = nccl.core.Communicator.init(RANKS, number, unique_id)
        self.ids = self.ids_of(number)
        self.rows = [float(100 * number + token + 1) for token in range(TOKENS) for _ in range(HIDDEN)]
        self.tokens = Memory("f", TOKENS, HIDDEN, numbers=self.rows)
        self.weights = Memory("f", TOKENS, TOP_K, numbers=[0.5, 0.25] * TOKENS)
        self.sums = Memory("f", TOKENS, HIDDEN)

    def ids_of(self, rank):
        return [(rank + token + k + 1) % EXPERTS for token in range(TOKENS) for k in range(TOP_K)]

    def check(self, what, got, expected):
        assert got == expected, f"rank {self.number}, {what}: got {got}, expected {expected}"
        self.passed += 1

    def group(self, algorithm, **more):
        return ep.Group.create(self.comm, ep.GroupConfig(
            algorithm=algorithm, num_experts=EXPERTS, max_dispatch_tokens_per_rank=TOKENS,
            max_token_bytes=4 * HIDDEN, num_topk=TOP_K, **more))

    def arrivals(self, expert=None):
        """The tokens for this rank, or one of its experts, by source rank and token: their first elements."""
        experts = range(LOCAL) if expert is None else (expert,)
        own = {self.number * LOCAL + each for each in experts}
        ids = [self.ids_of(rank) for rank in range(RANKS)]
        return [float(100 * rank + token + 1) for rank in range(RANKS) for token in range(TOKENS)
                if set(ids[rank][TOP_K * token:TOP_K * (token + 1)]) & own]

    def ranks_of(self, token):
        return len({each // LOCAL for each in self.ids[TOP_K * token:TOP_K * (token + 1)]})

    def check_sums(self, what, factors):
        expected = [row * factors[at // HIDDEN] for at, row in enumerate(self.rows)]
        self.check(what, self.sums.read(), expected)
        self.sums.write([-9] * len(self.rows))


def heads(rows):
    return rows.read()[::HIDDEN]


def low_latency(rank, staged):
    group = rank.group(ep.Algorithm.LOW_LATENCY)
    ids = Memory("q", TOKENS, TOP_K, numbers=rank.ids)
    handle = group.create_handle(ep.Layout.EXPERT_MAJOR, ids.tensor, stream=0)
    received, counters = Memory("f", LOCAL, ROWS, HIDDEN), Memory("i", LOCAL)
    handle.dispatch(ep.DispatchInputs(tokens=rank.tokens.tensor), ep.DispatchOutputs(tokens=received.tensor),
                    layout_info=ep.LayoutInfo(expert_counters=counters.tensor),
                    config=ep.DispatchConfig(send_only=int(staged)), stream=0)
    handle.complete(stream=0)
    counts = counters.read()
    for expert in range(LOCAL):
        arrived = rank.arrivals(expert)
        rank.check("rows of an expert", counts[expert], len(arrived))
        rank.check("rows", heads(received)[ROWS * expert:][:len(arrived)], arrived)
    outputs = ep.CombineOutputs(tokens=rank.sums.tensor, topk_weights=rank.weights.tensor)
    handle.combine(ep.CombineInputs(tokens=received.tensor), outputs, stream=0)
    rank.check_sums("LL expert-major", [0.75] * TOKENS)
    handle.destroy()
    group.destroy()


def by_rank(rank):
    group = rank.group(ep.Algorithm.LOW_LATENCY)
    ids = Memory("i", TOKENS, TOP_K, numbers=rank.ids)
    handle = group.create_handle(ep.Layout.RANK_MAJOR, ids.tensor, stream=0)
    received, out_ids = Memory("f", RANKS, TOKENS, HIDDEN), Memory("i", RANKS, TOKENS, TOP_K)
    out_weights, counters = Memory("f", RANKS, TOKENS, TOP_K), Memory("i", RANKS)
    info = ep.LayoutInfo(src_rank_counters=counters.tensor, recv_topk_idx_kind=ep.ExpertIdKind.GLOBAL)
    handle.dispatch(ep.DispatchInputs(tokens=rank.tokens.tensor, topk_weights=rank.weights.tensor),
                    ep.DispatchOutputs(tokens=received.tensor, topk_weights=out_weights.tensor,
                                       topk_idx=out_ids.tensor), layout_info=info, stream=0)
    rank.check("rows of all ranks", sum(counters.read()), len(rank.arrivals()))
    own = range(rank.number * LOCAL, (rank.number + 1) * LOCAL)
    rank.check("ids are global ones, or -1", set(out_ids.read()) - {-1} <= set(own), True)
    handle.combine(ep.CombineInputs(tokens=received.tensor), ep.CombineOutputs(tokens=rank.sums.tensor), stream=0)
    rank.check_sums("LL rank-major", [rank.ranks_of(token) for token in range(TOKENS)])
    handle.destroy()
    group.destroy()


def flat(rank, bound):
    """Both passes; without a bound the caller asks how many rows come."""
    group = rank.group(ep.Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=bound)
    ids, total = Memory("q", TOKENS, TOP_K, numbers=rank.ids), Memory("i", 1)
    info = ep.LayoutInfo(recv_total_counter=total.tensor)
    handle = group.create_handle(ep.Layout.FLAT, ids.tensor, layout_info=info, stream=0)
    handle.update(ids.tensor, layout_info=info, stream=0)
    arrived = rank.arrivals()
    rank.check("rows", total.read(), [len(arrived)])
    count = bound or len(arrived)
    received = Memory("f", count, HIDDEN)
    out_weights, out_ids = Memory("f", count, TOP_K), Memory("q", count, TOP_K)
    tokens, rows = ep.DispatchInputs(tokens=rank.tokens.tensor), ep.DispatchOutputs(tokens=received.tensor)
    forward = ep.DispatchInputs(tokens=rank.tokens.tensor, topk_weights=rank.weights.tensor)
    handle.dispatch(forward, ep.DispatchOutputs(tokens=received.tensor, topk_weights=out_weights.tensor,
                                                topk_idx=out_ids.tensor), stream=0)
    handle.complete(stream=0)
    rank.check("rows", heads(received)[:len(arrived)], arrived)
    factors = [rank.ranks_of(token) for token in range(TOKENS)]
    handle.combine(ep.CombineInputs(tokens=received.tensor), ep.CombineOutputs(tokens=rank.sums.tensor), stream=0)
    rank.check_sums("HT flat", factors)
    backward = ep.DispatchConfig(pass_direction=ep.PassDir.BWD)
    handle.dispatch(tokens, rows, config=backward, stream=0)
    gradients = Memory("f", TOKENS, TOP_K)
    handle.combine(ep.CombineInputs(tokens=received.tensor, topk_weights=out_weights.tensor),
                   ep.CombineOutputs(tokens=rank.sums.tensor, topk_weights=gradients.tensor),
                   config=ep.CombineConfig(pass_direction=ep.PassDir.BWD), stream=0)
    rank.check_sums("HT flat, backward", factors)
    rank.check("gradients", gradients.read(), rank.weights.read())
    refused = ep.DispatchOutputs(tokens=received.tensor, topk_weights=out_weights.tensor)
    try:
        handle.dispatch(forward, refused, stream=0)
        raise AssertionError("a dispatch without topk_idx was not refused")
    except Exception as error:  # noqa: BLE001, of a type that the package does not export
        rank.check("a refusal", str(error).endswith(f"code {INVALID_ARGUMENT}"), True)
    handle.destroy()
    group.destroy()


def by_expert(rank, bound):
    """Zones of a multiple of 4 rows; what is beyond the bound is dropped."""
    group = rank.group(ep.Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=bound,
                       overflow_policy=ep.OverflowPolicy.DROP)
    ids, total = Memory("i", TOKENS, TOP_K, numbers=rank.ids), Memory("q", 1)
    counters, offsets = Memory("q", LOCAL), Memory("q", LOCAL)
    config = ep.HandleConfig(dispatch_output_per_expert_alignment=4)
    handle = group.create_handle(ep.Layout.EXPERT_MAJOR, ids.tensor, config=config, stream=0, layout_info=ep.LayoutInfo(
        expert_counters=counters.tensor, expert_offsets=offsets.tensor, recv_total_counter=total.tensor))
    zones = [rank.arrivals(expert) for expert in range(LOCAL)]
    zones = [zone + [0.0] * (-len(zone) % 4) for zone in zones]
    slots = [row for zone in zones for row in zone]
    rank.check("slots", total.read(), [len(slots)])
    starts = [min(bound, sum(map(len, zones[:expert]))) for expert in range(LOCAL)]
    rank.check("where zones begin", offsets.read(), starts)
    rank.check("slots of zones", counters.read(), [min(len(zone), bound - at) for zone, at in zip(zones, starts)])
    received, out_weights = Memory("f", bound, HIDDEN), Memory("f", bound)
    handle.dispatch(ep.DispatchInputs(tokens=rank.tokens.tensor, topk_weights=rank.weights.tensor),
                    ep.DispatchOutputs(tokens=received.tensor, topk_weights=out_weights.tensor), stream=0)
    rank.check("rows", heads(received)[:len(slots)], slots[:bound])
    handle.combine(ep.CombineInputs(tokens=received.tensor), ep.CombineOutputs(tokens=rank.sums.tensor), stream=0)
    if bound >= len(slots):
        rank.check_sums("HT expert-major", [TOP_K] * TOKENS)
    handle.destroy()
    group.destroy()


def run(number, unique_id):
    rank = Rank(number, unique_id)
    rank.check("the library's version", str(ep.get_lib_version()), "0.2.0")
    library = ep.get_lib_path()
    rank.check("the library", library is None or library.name.startswith("libnccl_ep_2"), True)
    for staged in (False, True):
        low_latency(rank, staged)
    by_rank(rank)
    for bound in (ROWS, 0):
        flat(rank, bound)
    for bound in (2 * ROWS + 4 * LOCAL, TOKENS):
        by_expert(rank, bound)
    rank.comm.destroy()
    return rank.passed


def main():
    unique_id, results = nccl.core.get_unique_id(), []
    for number in range(RANKS):
        reads, writes = os.pipe()
        if os.fork() == 0:
            text = f"{run_safely(number, unique_id)}"
            os.write(writes, text.encode())
            os._exit(0)
        os.close(writes)
        results.append(reads)
    passed = [int(os.read(each, 64) or b"-1") for each in results]
    print(f"{sum(max(each, 0) for each in passed)} passed, {sum(each < 0 for each in passed)} failed")
    return int(min(passed) < 0)


def run_safely(number, unique_id):
    try:
        return run(number, unique_id)
    except BaseException:  # noqa: BLE001, whatever it is the others hear of it
        traceback.print_exc()
        return -1


if __name__ == "__main__":
    sys.exit(main())
