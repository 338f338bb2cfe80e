"""NVIDIA's `nccl.ep` package, as published, over `libnccl_ep.so.0`, which is preloaded: LL expert-major and rank-major,
HT flat and expert-major, both passes, a budget that drops, refusals.

Each token of a rank goes to the experts `rank + k + 1`, whose ranks return it as it is, so that a sum is the token
times the weights, or the number of ranks.
"""

import ctypes

import pytest
import torch
import torch.distributed as dist

try:
    from nccl import core, ep
except ImportError:
    ep = None

pytestmark = pytest.mark.skipif(ep is None, reason="no package nccl.ep")
LOCAL, TOKENS, TOP_K, HIDDEN, INVALID_ARGUMENT = 2, 3, 2, 64, 4


def sent(rank, size):
    """A rank's ids and tokens."""
    token = torch.arange(TOKENS)[:, None]
    return (rank + token + torch.arange(TOP_K) + 1) % (LOCAL * size), (100.0 * rank + token + 1).repeat(1, HIDDEN)


def empty(*shape, dtype=torch.float32):
    """-9 until somebody writes to it."""
    return torch.full(shape, -9, dtype=dtype)


def of(kind, **fields):
    """A structure of the package, with torch's tensors."""
    return kind(**{name: ep.Tensor(each) if torch.is_tensor(each) else each for name, each in fields.items()})


class Rank:
    """What this rank sends and expects, over a communicator of the package's own."""

    def __init__(self, world, comm):
        (self.rank, self.size), self.comm, self.made = world, comm, []
        self.ids, self.tokens = sent(*world)
        self.weights = torch.tensor([0.5, 0.25]).repeat(TOKENS, 1)
        self.own = LOCAL * self.rank + torch.arange(LOCAL)
        self.ranks = torch.tensor([[len(set(row))] for row in (self.ids // LOCAL).tolist()])

    def arrivals(self, experts):
        """The tokens for these experts, by source rank and token."""
        every = [sent(rank, self.size) for rank in range(self.size)]
        return torch.cat([tokens[torch.isin(ids, experts).any(1)] for ids, tokens in every])

    def open(self, algorithm, layout, ids, settings={}, **more):
        """A handle, of a group of its own; in low latency it reads the ids in every operation."""
        self.given = ids
        group = ep.Group.create(self.comm, ep.GroupConfig(
            algorithm=algorithm, num_experts=LOCAL * self.size, max_dispatch_tokens_per_rank=TOKENS,
            max_token_bytes=4 * HIDDEN, num_topk=TOP_K, **settings))
        self.made += [group, group.create_handle(layout, ep.Tensor(ids), stream=0, **more)]
        return self.made[-1]

    def dispatch(self, handle, more={}, weights=None, **outputs):
        inputs = of(ep.DispatchInputs, tokens=self.tokens, topk_weights=weights)
        handle.dispatch(inputs, of(ep.DispatchOutputs, **outputs), stream=0, **more)
        assert ctypes.CDLL(None).cudaStreamSynchronize(None) == 0

    def combine(self, handle, more={}, outputs={}, **inputs):
        sums = empty(TOKENS, HIDDEN)
        handle.combine(of(ep.CombineInputs, **inputs), of(ep.CombineOutputs, tokens=sums, **outputs), stream=0, **more)
        assert ctypes.CDLL(None).cudaStreamSynchronize(None) == 0
        return sums


@pytest.fixture(scope="module")
def comm(world):
    unique_id = [core.get_unique_id()]
    dist.broadcast_object_list(unique_id)
    made = core.Communicator.init(world[1], world[0], unique_id[0])
    yield made
    made.destroy()


@pytest.fixture
def mine(world, comm):
    rank = Rank(world, comm)
    yield rank
    for each in reversed(rank.made):
        each.destroy()


def test_the_library():
    assert str(ep.get_lib_version()) == "0.2.0"
    library = ep.get_lib_path()
    assert library is None or library.name.startswith("libnccl_ep_2")


@pytest.mark.parametrize("staged", [False, True])
def test_low_latency_by_expert(mine, staged):
    handle = mine.open(ep.Algorithm.LOW_LATENCY, ep.Layout.EXPERT_MAJOR, mine.ids)
    rows, counters = empty(LOCAL, mine.size * TOKENS, HIDDEN), empty(LOCAL, dtype=torch.int32)
    mine.dispatch(handle, {"layout_info": of(ep.LayoutInfo, expert_counters=counters),
                           "config": ep.DispatchConfig(send_only=int(staged))}, tokens=rows)
    handle.complete(stream=0)
    sums = mine.combine(handle, outputs={"topk_weights": mine.weights}, tokens=rows)
    for expert, block, count in zip(mine.own, rows, counters):
        assert torch.equal(block[:count], mine.arrivals(expert))
    assert torch.equal(sums, 0.75 * mine.tokens)


def test_low_latency_by_rank(mine):
    handle = mine.open(ep.Algorithm.LOW_LATENCY, ep.Layout.RANK_MAJOR, mine.ids.int())
    rows, counters = empty(mine.size, TOKENS, HIDDEN), empty(mine.size, dtype=torch.int32)
    ids, weights = empty(*rows.shape[:2], TOP_K, dtype=torch.int32), empty(*rows.shape[:2], TOP_K)
    info = of(ep.LayoutInfo, src_rank_counters=counters, recv_topk_idx_kind=ep.ExpertIdKind.GLOBAL)
    mine.dispatch(handle, {"layout_info": info}, mine.weights, tokens=rows, topk_weights=weights, topk_idx=ids)
    assert counters.sum() == len(mine.arrivals(mine.own))
    assert set(ids.flatten().tolist()) <= {-1, *mine.own.tolist()}
    assert torch.equal(mine.combine(handle, tokens=rows), mine.ranks * mine.tokens)


@pytest.mark.parametrize("is_bounded", [True, False])
def test_high_throughput_flat(mine, is_bounded):
    """Both passes; without a bound the caller asks how many rows come."""
    bound, total = mine.size * TOKENS * is_bounded, empty(1, dtype=torch.int32)
    info = of(ep.LayoutInfo, recv_total_counter=total)
    handle = mine.open(ep.Algorithm.HIGH_THROUGHPUT, ep.Layout.FLAT, mine.ids, {"max_recv_tokens_per_rank": bound},
                       layout_info=info)
    handle.update(ep.Tensor(mine.ids), layout_info=info, stream=0)
    arrived = mine.arrivals(mine.own)
    count = bound or len(arrived)
    rows, weights, ids = empty(count, HIDDEN), empty(count, TOP_K), empty(count, TOP_K, dtype=torch.int64)
    mine.dispatch(handle, weights=mine.weights, tokens=rows, topk_weights=weights, topk_idx=ids)
    handle.complete(stream=0)
    assert total == len(arrived) and torch.equal(rows[:len(arrived)], arrived)
    assert torch.equal(mine.combine(handle, tokens=rows), mine.ranks * mine.tokens)
    mine.dispatch(handle, {"config": ep.DispatchConfig(pass_direction=ep.PassDir.BWD)}, tokens=rows)
    gradients = empty(TOKENS, TOP_K)
    backward = {"config": ep.CombineConfig(pass_direction=ep.PassDir.BWD)}
    sums = mine.combine(handle, backward, {"topk_weights": gradients}, tokens=rows, topk_weights=weights)
    assert torch.equal(sums, mine.ranks * mine.tokens) and torch.equal(gradients, mine.weights)
    with pytest.raises(Exception, match=f"code {INVALID_ARGUMENT}$"):  # without topk_idx
        mine.dispatch(handle, weights=mine.weights, tokens=rows, topk_weights=weights)


@pytest.mark.parametrize("drops", [False, True])
def test_high_throughput_by_expert(mine, drops):
    """Zones of a multiple of 4 rows; what is beyond the bound is dropped."""
    bound = TOKENS if drops else 2 * mine.size * TOKENS + 4 * LOCAL
    counters, offsets, total = (empty(count, dtype=torch.int64) for count in (LOCAL, LOCAL, 1))
    handle = mine.open(
        ep.Algorithm.HIGH_THROUGHPUT, ep.Layout.EXPERT_MAJOR, mine.ids.int(),
        {"max_recv_tokens_per_rank": bound, "overflow_policy": ep.OverflowPolicy.DROP},
        config=ep.HandleConfig(dispatch_output_per_expert_alignment=4), layout_info=of(
            ep.LayoutInfo, expert_counters=counters, expert_offsets=offsets, recv_total_counter=total))
    rows, weights = empty(bound, HIDDEN), empty(bound)
    mine.dispatch(handle, weights=mine.weights, tokens=rows, topk_weights=weights)
    zones = [mine.arrivals(expert) for expert in mine.own]
    slots = torch.cat([torch.nn.functional.pad(zone, (0, 0, 0, -len(zone) % 4)) for zone in zones])
    sizes = torch.tensor([-(-len(zone) // 4) * 4 for zone in zones])
    starts = (sizes.cumsum(0) - sizes).clamp(max=bound)
    assert total == len(slots) and torch.equal(offsets, starts)
    assert torch.equal(counters, sizes.minimum(bound - starts))
    assert torch.equal(rows[:len(slots)], slots[:bound])
    sums = mine.combine(handle, tokens=rows)
    assert drops or torch.equal(sums, TOP_K * mine.tokens)
