"""`deep_ep.HybridEPBuffer`, of DeepEP's branch hybrid-ep, against the tokens of all ranks."""

import inspect
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from problems import captured, without_waiting

pytestmark = pytest.mark.high_throughput
_HIDDEN, _LOCAL = 64, 3


class Part(NamedTuple):
    """What one rank has."""

    hidden: torch.Tensor
    routing_map: torch.Tensor
    probs: torch.Tensor


class Routed:
    """Tokens of all ranks, none on rank 1, each for any number of experts up to `most`, also none."""

    def __init__(self, world, device, most=32, seed=1):
        random = torch.Generator().manual_seed(seed)
        self.rank, self.size = world
        self.parts = []
        for rank in range(self.size):
            tokens = 0 if rank == 1 else 7 + 4 * rank
            chosen = torch.rand((tokens, _LOCAL * self.size), generator=random) < 0.4
            chosen &= chosen.cumsum(dim=1) <= most
            probs = torch.where(chosen, torch.rand(chosen.shape, generator=random), 0.0)
            hidden = torch.randn((tokens, _HIDDEN), generator=random).to(torch.bfloat16)
            self.parts.append(Part(*(each.to(device) for each in (hidden, chosen, probs))))

    @property
    def mine(self):
        return self.parts[self.rank]

    def slots(self, rank, alignment):
        """(source, token, expert) of each row by expert of a rank, None where it is filled up; and rows of experts."""
        slots, counts = [], []
        for expert in range(rank * _LOCAL, (rank + 1) * _LOCAL):
            first = len(slots)
            for source, part in enumerate(self.parts):
                slots += [(source, token, expert) for token in part.routing_map[:, expert].nonzero().flatten().tolist()]
            slots += [None] * (-len(slots) % alignment)
            counts.append(len(slots) - first)
        return slots, counts

    def kept(self, alignment, budgets):
        """Of this rank's map what stays if each rank has room for so many rows."""
        kept = torch.zeros_like(self.mine.routing_map)
        for rank, budget in enumerate(budgets):
            for slot in self.slots(rank, alignment)[0][:budget]:
                if slot is not None and slot[0] == self.rank:
                    kept[slot[1], slot[2]] = True
        return kept


@pytest.fixture(scope="module")
def buffer(deep_ep, world):
    return deep_ep.HybridEPBuffer(group=dist.group.WORLD, hidden_dim=_HIDDEN, max_num_of_tokens_per_rank=20 * world[0],
                                  num_local_experts=_LOCAL)


@pytest.fixture(params=[32, 2], ids=["dense", "few"])
def most(request, deep_ep, monkeypatch):
    """Experts of a token, fewer than there are or not."""
    monkeypatch.setattr(deep_ep.HybridEPBuffer, "max_topk", request.param)
    return request.param


def dispatched(buffer, routed, **how):
    mine = routed.mine
    return buffer.dispatch_with_permute(hidden=mine.hidden, routing_map=mine.routing_map, probs=mine.probs,
                                        scaling_factor=None, **how)


def check_rows(routed, rows, probs, slots):
    """Rows and probs are those of the slots, zeros where one is filled up; probs are zeros behind them."""
    for at, slot in enumerate(slots):
        part = None if slot is None else routed.parts[slot[0]]
        assert torch.equal(rows[at], torch.zeros_like(rows[at]) if part is None else part.hidden[slot[1]])
        assert probs[at] == (0 if part is None else part.probs[slot[1:]])
    assert not probs[len(slots):].any()


def check_combined(routed, sums, probs, kept):
    """Of rows as they came."""
    expected = routed.mine.hidden.float() * kept.sum(dim=1, keepdim=True)
    torch.testing.assert_close(sums.float(), expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(probs, torch.where(kept, routed.mine.probs, 0.0))


@pytest.mark.parametrize("alignment", [None, 8])
@pytest.mark.parametrize("waits", [True, False])
def test_rows_by_expert(buffer, world, device, most, alignment, waits):
    """All that comes, there and back, and the same once more with the handle, as a backward does."""
    routed = Routed(world, device, most)
    slots, counts = routed.slots(world[0], alignment or 1)
    rows = len(slots) if waits else len(slots) + 16
    received, probs, scales, per_expert, handle = dispatched(
        buffer, routed, pad_multiple=alignment, num_of_experts_per_rank=_LOCAL, non_blocking=not waits,
        num_permuted_tokens=None if waits else rows)
    assert scales is None and received.shape == (rows, _HIDDEN) and probs.shape == (rows,)
    assert per_expert.dtype == torch.int64 and per_expert.tolist() == counts
    assert per_expert.device.type == ("cpu" if waits else device.type)
    assert not handle[-1].any() and handle[-1].shape == (1,)
    check_rows(routed, received, probs, slots)
    again, none, *_, same = buffer.dispatch_with_permute(
        hidden=routed.mine.hidden, scaling_factor=None, handle=handle, pad_multiple=alignment,
        num_permuted_tokens=per_expert.sum())
    assert none is None and same is handle and torch.equal(again[:len(slots)], received[:len(slots)])
    more = buffer.dispatch_with_permute(hidden=routed.mine.hidden, probs=routed.mine.probs, handle=handle)[1]
    assert torch.equal(more, probs)
    check_combined(routed, *buffer.combine_with_unpermute(hidden=received, probs=probs, handle=handle,
                                                          pad_multiple=alignment), routed.mine.routing_map)
    assert buffer.combine_with_unpermute(hidden=received, handle=handle)[1] is None


@pytest.mark.parametrize("alignment", [1, 4])
def test_rows_beyond_a_budget_are_dropped(buffer, world, device, most, alignment):
    """The last ones, by a budget that differs by rank; one has no room at all."""
    routed = Routed(world, device, most)
    budgets = [4 * rank if rank < 3 else 1000 for rank in range(1, world[1])] + [0]
    slots, counts = routed.slots(world[0], alignment)
    budget = budgets[world[0]]
    with without_waiting(device):
        received, probs, _, per_expert, handle = dispatched(buffer, routed, pad_multiple=alignment, non_blocking=True,
                                                            num_permuted_tokens=budget)
        sums, home = buffer.combine_with_unpermute(hidden=received, probs=probs, handle=handle, pad_multiple=alignment)
    ends = torch.tensor([0, *counts]).cumsum(dim=0).clamp(max=budget)
    assert per_expert.tolist() == ends.diff().tolist() and received.shape[0] == budget
    assert handle[-1].tolist() == [len(slots) > budget]
    check_rows(routed, received, probs, slots[:budget])
    check_combined(routed, sums, home, routed.kept(alignment, budgets))


def test_ids(buffer, world, device):
    """A routing by ids and weights, some -1, gives what its map gives, and gradients of all experts."""
    routed = Routed(world, device, most=2)
    mine = routed.mine
    weights, ids = mine.probs.topk(2, dim=1)
    ids[weights == 0] = -1
    given = ids.clone()
    received, probs, _, per_expert, handle = buffer.dispatch_with_permute(
        hidden=mine.hidden, topk_idx=given, topk_weights=weights, num_of_experts=_LOCAL * world[1])
    given.fill_(-1)
    slots, counts = routed.slots(world[0], 1)
    assert per_expert.tolist() == counts
    check_rows(routed, received, probs, slots)
    combined = buffer.combine_with_unpermute(hidden=received, probs=probs, handle=handle)
    check_combined(routed, *combined, mine.routing_map)


def test_scales(buffer, world, device):
    """FP8 rows bring theirs."""
    routed = Routed(world, device)
    hidden = routed.mine.hidden.to(torch.float8_e4m3fn)
    scales = torch.arange(len(hidden), device=device, dtype=torch.float32)[:, None].expand(-1, 2) + 100 * world[0]
    received, _, came, _, _ = buffer.dispatch_with_permute(hidden=hidden, routing_map=routed.mine.routing_map,
                                                           scaling_factor=scales, pad_multiple=4)
    for at, slot in enumerate(routed.slots(world[0], 4)[0]):
        source, token, _ = slot or (0, 0, None)
        assert came[at].tolist() == [100 * source + token if slot else 0] * 2
        row = routed.parts[source].hidden[token].to(torch.float8_e4m3fn).float()
        assert torch.equal(received[at].float(), row if slot else torch.zeros_like(row))


def test_more_tokens_than_the_buffer_was_made_for(buffer, world, device):
    """On all ranks; rank 0 made it for none."""
    for tokens in (700, 8):
        hidden = torch.ones((tokens, _HIDDEN), dtype=torch.bfloat16, device=device)
        routing_map = torch.ones((tokens, _LOCAL * world[1]), dtype=torch.bool, device=device)
        rows, *_, handle = buffer.dispatch_with_permute(hidden=hidden, routing_map=routing_map)
        assert len(rows) == tokens * world[1] * _LOCAL
        sums, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
        assert bool((sums == _LOCAL * world[1]).all())
    assert buffer.config.max_num_of_tokens_per_rank == 20 * (world[1] - 1)


def test_a_token_with_too_many_experts(buffer, world, device, deep_ep, monkeypatch):
    """Is refused, and its rows are never wrong; afterwards all goes on."""
    if world[1] == 1:
        pytest.skip("a rank alone has fewer experts")
    monkeypatch.setattr(deep_ep.HybridEPBuffer, "max_topk", 4)
    hidden = torch.ones((3, _HIDDEN), dtype=torch.bfloat16, device=device)
    routing_map = torch.ones((3, _LOCAL * world[1]), dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match="routing_map: a token has more than 4 experts, which HybridEPBuffer.max_topk"):
        buffer.dispatch_with_permute(hidden=hidden, routing_map=routing_map)
    if device.type == "cpu":  # a GPU stops for good
        with pytest.raises(RuntimeError, match="routing_map: a token has more than 4 experts"):
            buffer.dispatch_with_permute(hidden=hidden, routing_map=routing_map, num_permuted_tokens=8)
    routing_map[:, 4:] = False
    assert buffer.dispatch_with_permute(hidden=hidden, routing_map=routing_map)[3].tolist() == [
        3 * world[1] if world[0] * _LOCAL + local < 4 else 0 for local in range(_LOCAL)]


def test_graph(captures, buffer, world, device, most):
    """A replay routes by the map that is there then."""
    first, second = (Routed(world, device, most, seed) for seed in (2, 3))

    def layer():
        received, probs, *_, handle = dispatched(buffer, first, num_permuted_tokens=256, pad_multiple=4)
        return received, probs, *buffer.combine_with_unpermute(hidden=received, probs=probs, handle=handle)

    graph, (received, probs, *combined) = captured(layer)
    for before, after in zip(first.mine, second.mine):
        before.copy_(after)
    graph.replay()
    check_rows(second, received, probs, second.slots(world[0], 4)[0])
    check_combined(second, *combined, second.mine.routing_map)


def test_what_callers_ask_for(buffer, deep_ep, world):
    parameters = inspect.signature(deep_ep.HybridEPBuffer.dispatch_with_permute).parameters
    assert "fuse_permute_dispatch" in parameters
    assert (buffer.rank, buffer.group_size, buffer.group) == (*world, dist.group.WORLD)
    assert (buffer.config.hidden_dim, buffer.config.num_of_experts_per_rank) == (_HIDDEN, _LOCAL)


def test_what_is_not_served(buffer, world, device):
    """The text names the argument."""
    routed = Routed(world, device)
    mine = routed.mine
    *_, handle = dispatched(buffer, routed)
    ids = torch.zeros((len(mine.hidden), 1), dtype=torch.int64, device=device)
    for call, kind, text in (
            (lambda: buffer.dispatch(mine.hidden), NotImplementedError, "dispatch: of this class"),
            (lambda: buffer.no_such_thing, AttributeError, "no_such_thing"),
            (lambda: handle[0], NotImplementedError, "handle"),
            (lambda: dispatched(buffer, routed, non_blocking=True), ValueError, "num_permuted_tokens"),
            (lambda: dispatched(buffer, routed, num_permuted_tokens=-1), ValueError, "num_permuted_tokens"),
            (lambda: dispatched(buffer, routed, pad_multiple=3), ValueError, "pad_multiple: must be a power of two"),
            (lambda: dispatched(buffer, routed, topk_idx=ids), ValueError, "routing_map, topk_idx: one of them"),
            (lambda: dispatched(buffer, routed, num_of_experts_per_rank=4), ValueError, "routing_map: has shape"),
            (lambda: dispatched(buffer, routed, num_of_experts=1, num_of_experts_per_rank=4), ValueError,
             "num_of_experts: is 1, but num_of_experts_per_rank is 4"),
            (lambda: buffer.dispatch_with_permute(mine.hidden, routing_map=mine.routing_map, probs=mine.probs.double()),
             ValueError, "probs: has type"),
            (lambda: buffer.dispatch_with_permute(mine.hidden), ValueError, "routing_map, topk_idx"),
            (lambda: buffer.dispatch_with_permute(mine.hidden, routing_map=mine.probs), ValueError, "routing_map"),
            (lambda: buffer.dispatch_with_permute(mine.hidden, handle=1), TypeError, "handle"),
            (lambda: buffer.combine_with_unpermute(mine.hidden), TypeError, "handle")):
        with pytest.raises(kind, match=text):
            call()
    assert not hasattr(buffer, "combine")
