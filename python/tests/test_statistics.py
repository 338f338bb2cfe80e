"""Running totals: the rows that each local expert receives, the time that a rank waits for others."""

import os
import time
import weakref

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep import EpGroup
from nccl_ep.runtime import Runtime

_EXPERTS, _TOKENS, _TOP_K, _HIDDEN = 3, 5, 2, 16


def _group(group, world, algorithm: str) -> EpGroup:
    return group(num_experts=_EXPERTS * world[1], hidden=_HIDDEN, algorithm=algorithm, max_tokens_per_rank=_TOKENS)


def _routing(group: EpGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's ids, and the rows that they and those of all others bring to each of its experts."""
    random = torch.Generator().manual_seed(group.rank)
    ids = torch.rand(_TOKENS, group.num_experts, generator=random).topk(_TOP_K, dim=1).indices
    counts = ids.flatten().bincount(minlength=group.num_experts)
    dist.all_reduce(counts)
    first = group.rank * _EXPERTS
    return ids.to(group.device), counts[first:first + _EXPERTS].to(group.device)


def test_each_dispatch_counts(group, world, algorithm):
    made = _group(group, world, algorithm)
    ids, counts = _routing(made)
    rows = torch.full((_EXPERTS,), 7, dtype=torch.int64, device=made.device)
    tokens = torch.ones(_TOKENS, _HIDDEN, dtype=torch.bfloat16, device=made.device)
    with made.create_handle(ids) as handle:
        made.count_rows(rows)
        handle.dispatch(tokens)
        handle.dispatch(tokens)
        assert torch.equal(rows, 7 + 2 * counts)
        rows.zero_()
        handle.dispatch(tokens)
        made.count_rows(None)
        handle.dispatch(tokens)
        assert torch.equal(rows, counts)


def test_dispatches_in_stages_count_where_they_are_received(group, world):
    made = _group(group, world, "ll")
    ids, counts = _routing(made)
    rows = torch.zeros(_EXPERTS, dtype=torch.int64, device=made.device)
    made.count_rows(rows)
    with made.create_handle(ids) as handle:
        handle.dispatch(torch.ones(_TOKENS, _HIDDEN, dtype=torch.bfloat16, device=made.device), send_only=True)
        assert not rows.any()
        handle.complete()
        assert torch.equal(rows, counts)


def test_totals_are_kept_as_long_as_something_adds(group, world, monkeypatch):
    """Until others take their place, a staged operation is complete, or, for graphs, the group ends."""
    made = _group(group, world, "ll")
    tokens = torch.ones(_TOKENS, _HIDDEN, dtype=torch.bfloat16, device=made.device)
    alive = []
    with made.create_handle(_routing(made)[0]) as handle:
        for is_captured, staged in ((False, False), (True, False), (False, True)):
            waits = torch.zeros(world[1], dtype=torch.int64, device=made.device)
            alive.append(weakref.ref(waits))
            made.time_waits(waits)
            with monkeypatch.context() as patch:
                patch.setattr(Runtime, "is_capturing", lambda *_, answer=is_captured: answer)
                handle.dispatch(tokens, send_only=staged)
            made.time_waits(None)
            del waits
        assert [each() is not None for each in alive] == [False, True, True]
        handle.complete()
        assert [each() is not None for each in alive] == [False, True, False]
    made.close()
    assert alive[1]() is None


def test_what_does_not_fit_is_refused(group, world):
    made = _group(group, world, "ll")
    for wrong in (torch.zeros(_EXPERTS, dtype=torch.int32), torch.zeros(_EXPERTS + 1, dtype=torch.int64)):
        with pytest.raises((TypeError, ValueError), match="rows: "):
            made.count_rows(wrong.to(made.device))
    with pytest.raises(nccl_ep.InvalidArgumentError, match="rows_of_expert: must be aligned"):
        made.library.ncclEpGroupCountRows(made.handle, 4)
    with pytest.raises((TypeError, ValueError), match="waits: "):
        made.time_waits(torch.zeros(world[1] + 1, dtype=torch.int64, device=made.device))


@pytest.mark.parametrize("algorithm, operation", [
    ("ll", "dispatch"), ("ll", "combine"), pytest.param("ht", "combine", marks=pytest.mark.high_throughput)])
def test_waits_for_a_late_rank_are_timed(group, world, algorithm, operation):
    made = _group(group, world, algorithm)
    rank, ranks = world
    waits = torch.zeros(ranks, dtype=torch.int64, device=made.device)
    tokens = torch.ones(_TOKENS, _HIDDEN, dtype=torch.bfloat16, device=made.device)
    weights = [torch.ones(_TOKENS, _TOP_K, device=made.device)] if algorithm == "ll" else []
    time_waits = made.time_waits if operation == "dispatch" else made.time_combine_waits
    ids = _routing(made)[0]
    with made.create_handle(ids) as handle:
        rows = handle.dispatch(tokens).tokens

        def play() -> None:
            if operation == "dispatch":
                handle.dispatch(tokens)
            else:
                handle.combine(rows, *weights)

        play()
        assert not waits.any()
        time_waits(waits)
        for _ in range(3):
            dist.barrier()
            if rank == ranks - 1:
                time.sleep(0.05)
            play()
        time_waits(None)
        timed = waits.tolist()
        play()
    assert waits.tolist() == timed
    # Hosts that come late from the barrier have seen less of it. Messages of other nodes are waited for before.
    is_awaited = algorithm == "ll" or (ids >= _EXPERTS * (ranks - 1)).any()
    assert min(timed) >= 0
    assert rank == ranks - 1 or "NCCL_HOSTID" in os.environ or not is_awaited or timed[-1] > 1_000_000
