"""EpGroup and EpHandle: low latency, staged and high-throughput operations, closing, refusals."""

import gc
import os
import pathlib
import threading
import warnings

import pytest
import torch

from nccl_ep import EpGroup, NCCLLibrary, NcclEpError
from problems import Problem


def expected_slots(problem: Problem, local: int) -> torch.Tensor:
    """The rows that an LL dispatch delivers to an expert of this rank: by source rank, token, k."""
    expert = problem.rank * (problem.num_experts // problem.size) + local
    return problem.of_all(0)[(problem.of_all(1) == expert).any(dim=1)]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_latency(opened, dtype, staged):
    problem, ep, handle = opened("ll", dtype=dtype, masked=True)
    with handle:
        received = handle.dispatch(problem.tokens, send_only=staged)
        handle.complete()
        for local in range(ep.num_local_experts):
            want = expected_slots(problem, local)
            assert received.counts[local] == len(want)
            assert torch.equal(received.tokens[local, :len(want)], want)
        combined = handle.combine(received.tokens, problem.weights, send_only=staged)
        handle.complete()
    problem.close(combined, problem.tokens.float() * problem.factors)


def test_two_staged_handles(opened, world, device):
    first, ep, handle = opened("ll", seed=3)
    second = Problem(*world, device=device, seed=4)
    problems, handles = (first, second), (handle, ep.create_handle(second.topk_idx))
    received = [handle.dispatch(problem.tokens, send_only=True)
                for handle, problem in zip(handles, problems)]
    gc.collect()
    for handle in handles:
        handle.complete()
    for handle, problem, result in zip(handles, problems, received):
        want = expected_slots(problem, 0)
        assert torch.equal(result.tokens[0, :len(want)], want)
        problem.close(handle.combine(result.tokens, problem.weights), problem.tokens * problem.factors)


def test_low_latency_reads_ids_in_place(group, rank, size, device):
    ep = group(num_experts=size, hidden=8, max_tokens_per_rank=1, dtype=torch.float32)
    ids = torch.zeros((1, 1), dtype=torch.int64, device=device)
    handle = ep.create_handle(ids)
    for target in range(size):
        ids.fill_(target)
        received = handle.dispatch(torch.full((1, 8), float(rank), device=device))
        assert received.counts.item() == (size if rank == target else 0)


def test_of_other_ids_the_handle_has_a_copy(group, rank, size, device):
    """The handle copies ids of another type or not contiguous; the copy may be changed in place."""
    ep = group(num_experts=size, hidden=8, max_tokens_per_rank=2, dtype=torch.float32)
    for ids in (torch.zeros((2, 1), dtype=torch.int32, device=device),
                torch.zeros((2, 2), dtype=torch.int64, device=device)[:, 1:]):
        handle = ep.create_handle(ids)
        ids.fill_(-1)
        handle.topk_idx.fill_(size - 1)
        received = handle.dispatch(torch.ones((2, 8), device=device))
        assert received.counts.item() == (2 * size if rank == size - 1 else 0)


@pytest.mark.high_throughput
def test_high_throughput_cached_and_bounded(opened, size):
    """A tokens-only dispatch over the handle's routing, and the bound R*M of a group with M."""
    problem, ep, _ = opened("ht", bound=9 + 2 * size)
    handle = ep.create_handle(problem.topk_idx.to(torch.int32))
    assert handle.num_recv_tokens == size * ep.max_tokens_per_rank
    first = handle.dispatch(problem.tokens, problem.weights)
    again = handle.dispatch(problem.tokens, out=torch.empty_like(first.tokens))
    assert again.topk_idx is None and torch.equal(again.tokens, first.tokens)
    rows = int((first.topk_idx >= 0).any(dim=1).sum())
    assert torch.equal(first.tokens[rows:], torch.zeros_like(first.tokens[rows:]))
    problem.close(handle.combine(again.tokens), problem.tokens * problem.ranks)


@pytest.mark.high_throughput
def test_high_throughput_counts_at_creation(opened, rank, device):
    """Counts tokens per local expert; an id that a token repeats counts once."""
    problem, ep, _ = opened("ht", masked=True)
    ids = problem.topk_idx.clone()
    ids[:, 1] = ids[:, 0]
    counts = torch.full((ep.num_local_experts,), -1, dtype=torch.int32, device=device)
    ep.create_handle(ids, counts=counts)
    everywhere = problem.of_all(1)
    everywhere[:, 1] = everywhere[:, 0]
    first = rank * ep.num_local_experts
    assert counts.tolist() == [int((everywhere == first + expert).any(dim=1).sum())
                               for expert in range(ep.num_local_experts)]
    for wrong, text in ((counts[1:], "counts: has shape"), ([0], "counts: must be a tensor"),
                        (counts.repeat(2)[::2], "counts: must be contiguous")):
        with pytest.raises((TypeError, ValueError), match=text):
            ep.create_handle(ids, counts=wrong)


def test_shapes_types_and_devices_are_checked(small, size, device):
    ep, handle = small(2)
    tokens = torch.zeros((2, 8), device=device)
    slots = torch.zeros((1, 2 * size, 8), device=device)
    weights = torch.ones((2, 1), device=device)
    for call, text in (
            (lambda: handle.dispatch(tokens[:1]), r"has shape \[1, 8\], expected \[2, H\]"),
            (lambda: handle.dispatch(tokens.to("meta")), "tokens: is on meta"),
            (lambda: handle.dispatch(tokens, weights), "belong to combine"),
            (lambda: handle.combine(slots), "topk_weights: needed"),
            (lambda: handle.combine(slots, weights.double()), "has type torch.float64"),
            (lambda: handle.dispatch(tokens, out=slots.mT.contiguous().mT), "must be contiguous"),
            (lambda: handle.dispatch(tokens, out=slots.bfloat16()), "has type torch.bfloat16"),
            (lambda: handle.dispatch(tokens, out=[]), "out: must be a tensor, not list"),
            (lambda: handle.dispatch(tokens, out=torch._neg_view(slots)), "no negative view"),
            (lambda: handle.combine(None, weights), "tokens: must be a tensor"),
            (lambda: handle.combine(slots, [1.0]), "topk_weights: must be a tensor"),
            (lambda: handle.combine(slots, weights, out=()), "out: must be a tensor"),
            (lambda: ep.create_handle(tokens[0]), "topk_idx: has shape"),
            (lambda: ep.create_handle(tokens), "topk_idx: has type torch.float32"),
            (lambda: ep.create_handle(tokens > 0), "topk_idx: has type torch.bool")):
        with pytest.raises((TypeError, ValueError), match=text):
            call()
    with pytest.raises(NcclEpError, match="ncclEpCombine.*dispatch"):
        handle.combine(slots, weights)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="no streams on the CPU"):
            handle.dispatch(tokens, stream=object())


@pytest.mark.parametrize("settings, text", [
    ({"num_experts": -8}, "num_experts: must be 1 to 4294967295, not -8"),
    ({"num_experts": 0}, "num_experts: must be 1 to 4294967295, not 0"),
    ({"hidden": 0}, "hidden: must be 1 to 2147483647, not 0"),
    ({"hidden": 7}, "hidden: 7 bfloat16 are 14 bytes, not a multiple of 16"),
    ({"algorithm": "ll"}, "max_tokens_per_rank: must be 1 or more with algorithm 'll'"),
    ({"hidden": 2**31}, "hidden: must be 1 to 2147483647, not 2147483648"),
    ({"max_tokens_per_rank": 2**32 + 4}, "max_tokens_per_rank: must be 0 to"),
    ({"num_channels": -1}, "num_channels: must be 0 to")])
def test_numbers_that_no_group_can_have_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        EpGroup(**{"num_experts": 8, "hidden": 8, "algorithm": "ht", **settings})


@pytest.mark.parametrize("shape", [(2**32 + 4, 0), (2**32, 0), (0, 2**32 + 1)])
def test_extents_that_c_cannot_hold_are_refused(group, size, device, shape):
    ep = group(num_experts=size, hidden=8, max_tokens_per_rank=8, dtype=torch.float32)
    ids = torch.empty(shape, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="TOPK_IDX: has shape .* at most 4294967295"):
        ep.create_handle(ids)


def as_columns(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], dim=-1)[..., :tensor.shape[-1]]


@pytest.mark.parametrize("given, sign", [(as_columns, 1), (torch._neg_view, -1)])
def test_tensors_that_lie_otherwise(group, rank, size, device, given, sign):
    """In columns of a larger one, or with a sign that torch keeps beside the memory."""
    ep = group(num_experts=size, hidden=8, max_tokens_per_rank=2, dtype=torch.float32)
    tokens = torch.arange(16.0, device=device).reshape(2, 8)
    weights = torch.full((2, 1), 0.5, device=device)
    with ep.create_handle(torch.full((2, 1), rank, device=device)) as handle:
        received = handle.dispatch(given(tokens))
        assert torch.equal(received.tokens[0, :2], sign * tokens)
        home = handle.combine(given(received.tokens), given(weights))
        assert torch.equal(home, sign * tokens * 0.5)


def test_no_communicator_is_left_when_a_group_cannot_be_made(world, monkeypatch):
    """Whatever the reason, such as a library that has NCCL's functions only."""
    ended = []
    destroy = NCCLLibrary.ncclCommDestroy
    monkeypatch.setattr(NCCLLibrary, "ncclCommDestroy",
                        lambda self, comm: (ended.append(comm), destroy(self, comm)))
    for name in ("ncclEpCreateGroup", "ncclCommCount"):
        def fail(*_):
            raise KeyError("no such function")

        with monkeypatch.context() as broken:
            broken.setattr(NCCLLibrary, name, fail)
            with pytest.raises(KeyError):
                EpGroup(world[1], 8, max_tokens_per_rank=1)
    assert len(ended) == 2


def test_closing(small, device):
    ep, handle = small(1)
    ep.close()
    ep.close()
    with pytest.raises(RuntimeError, match="group is closed"):
        ep.create_handle(torch.zeros((1, 1), dtype=torch.int64, device=device))
    handle.close()
    handle.close()
    with pytest.raises(RuntimeError, match="handle is closed"):
        handle.complete()


def test_closing_where_python_starts_no_threads(group, world, monkeypatch):
    """As in functions of atexit, from Python 3.12 on."""
    def refuse(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    ep = group(num_experts=world[1], hidden=8, max_tokens_per_rank=2)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    ep.close()


def test_a_group_that_was_not_closed_warns(world):
    """The garbage collector does not close it: closing is collective."""
    forgotten = EpGroup(world[1], 8, max_tokens_per_rank=1)
    raw, comm = forgotten._group, forgotten._owned_comm
    library = forgotten.library
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del forgotten
        gc.collect()
    assert [each.category for each in caught] == [ResourceWarning]
    library.ncclEpGroupDestroy(raw)
    library.ncclCommDestroy(comm)


def test_no_files_are_left_in_the_working_directory(world):
    before = set(os.listdir(pathlib.Path.cwd()))
    with EpGroup(world[1], 8, max_tokens_per_rank=1):
        assert set(os.listdir(pathlib.Path.cwd())) == before
