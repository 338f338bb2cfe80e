"""Tuning: the candidates, the choice of the best, and the file."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep import Choice, tuning
from nccl_ep.tuning import in_place, search
from nccl_ep.tuning.candidates import VARIABLE, Candidate, candidates, document, in_force, write
from nccl_ep.tuning.progress import Progress
from nccl_ep.tuning.ranks import Ranks
from nccl_ep.tuning.search import best


def test_candidates_fit_the_gpu():
    for algorithm in ("ll", "ht"):
        for multiprocessors in (1, 2, 20, 132):
            found = candidates(algorithm, multiprocessors, 0)
            assert len(set(found)) == len(found)
            assert max(each.blocks for each in found) == multiprocessors
            assert all(1 <= each.send_blocks <= each.blocks for each in found)
            assert all(each.threads % 32 == 0 for each in found)
        assert max(each.blocks for each in candidates(algorithm, 132, 20)) == 20


def test_the_librarys_own_choice_stays_unless_another_is_clearly_faster():
    tried = [None, Candidate(8, 256, 8), Candidate(16, 512, 4)]
    # [candidate, number of tokens, operation]
    times = torch.tensor([[[10.0, 10.0], [10.0, 10.0]], [[9.0, 9.9], [11.0, 20.0]],
                          [[8.0, 12.0], [12.0, 5.0]]])
    entries = best("ll", [1, 2], tried, times)
    names = [(entry["operation"], entry["tokens"], entry.get("blocks", "own")) for entry in entries]
    assert names == [("ll_dispatch", 1, 16), ("ll_dispatch", 2, "own"),
                     ("ll_combine", 1, "own"), ("ll_combine", 2, 16)]
    assert entries[0]["microseconds"] == 8.0 and entries[0]["default_microseconds"] == 10.0
    assert entries[1]["default"] is True


def test_the_slowest_rank_counts(world, comm):
    rank, size = world
    times = torch.tensor([float(rank), 1.0 - rank])
    assert Ranks(comm).slowest(times).tolist() == [size - 1, 1.0]


def test_a_candidate_is_in_force_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "before.json")
    with in_force(document("G", 2, [{"tokens": 1}])) as path:
        assert os.environ[VARIABLE] == str(path)
        assert json.loads(path.read_text())["entries"] == [{"tokens": 1}]
    assert not path.exists() and os.environ[VARIABLE] == "before.json"
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ZeroDivisionError), in_force({}):
        1 / 0
    assert VARIABLE not in os.environ


def test_the_librarys_sample_is_what_is_written(tmp_path):
    """A unit test of the library reads the same file."""
    tried = [None, Candidate(32, 512, 8)]
    times = torch.tensor([[[15.25, 16.0]], [[14.5, 17.0]]])
    path = tmp_path / "times.json"
    write(path, document("NVIDIA H200", 4, best("ll", [8], tried, times), num_experts=256,
                         hidden=7168, top_k=8, dtype="bfloat16", nccl="2.28.9"))
    sample = pathlib.Path(__file__).parent / "data" / "tuning.json"
    assert path.read_text() == sample.read_text()


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "times.json"
    for number in (1, 2):
        write(path, {"number": number})
        assert json.loads(path.read_text()) == {"number": number}
    assert os.listdir(tmp_path) == ["times.json"]


def test_torchs_defaults_do_not_matter(world, tmp_path, monkeypatch):
    """Neither torch's default type nor its default device affects tuning."""
    _, size = world
    monkeypatch.setattr(search, "candidates", lambda *_: [])
    shape = nccl_ep.MoeShape(num_experts=size, hidden=64, top_k=1, max_tokens_per_rank=1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = nccl_ep.tune(tmp_path / "times.json", shape, repetitions=1, progress=False)
    finally:
        torch.set_default_dtype(before)
    assert [entry["default"] for entry in found["entries"]] == [True, True]


def test_what_cannot_be_tuned(world, tmp_path):
    rank, size = world
    shape = nccl_ep.MoeShape(num_experts=size, hidden=64, top_k=1, max_tokens_per_rank=1)
    nothing = dataclasses.replace(shape, max_tokens_per_rank=0)
    for arguments, text in (((shape, "mid"), "algorithms: must be 'll' or 'ht', not 'mid'"),
                            ((shape, ["ll", "l"]), "not 'l'"),
                            ((nothing, "ll"), "max_tokens_per_rank: must be positive")):
        with pytest.raises(ValueError, match=text):
            nccl_ep.tune(tmp_path / "times.json", arguments[0], algorithms=arguments[1])


@pytest.mark.parametrize("place", ["no/such/folder/times.json", "."])
def test_a_file_that_cannot_be_written(world, tmp_path, monkeypatch, place):
    """Every rank reports it with the caller's path before anything is measured."""
    rank, size = world
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "Bench", None)
    shape = nccl_ep.MoeShape(num_experts=size, hidden=64, top_k=1, max_tokens_per_rank=1)
    with pytest.raises(OSError, match=f"^{place}: cannot be written: "):
        nccl_ep.tune(place, shape)
    assert os.listdir(tmp_path) == []


def test_a_file_that_cannot_be_written_any_more(comm):
    """Such as on a disk that has filled up meanwhile: no rank waits for rank 0."""
    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="times.json: cannot be written: No space left"):
        Ranks(comm).on_first(full, "times.json")


@pytest.mark.parametrize("algorithm", [
    "ll", pytest.param("ht", marks=pytest.mark.high_throughput)])
def test_tuning_end_to_end(world, device, monkeypatch, tmp_path, algorithm):
    """All ranks measure, agree and return the same; rank 0 writes it; a group uses the file."""
    rank, size = world
    monkeypatch.delenv(VARIABLE, raising=False)
    if device.type == "cpu":
        few = [Candidate(4, 256, 4), Candidate(8, 256, 2)]
        monkeypatch.setattr(search, "candidates", lambda *_: few)
    path = tmp_path / "times.json"
    shape = nccl_ep.MoeShape(num_experts=2 * size, hidden=64, top_k=2, max_tokens_per_rank=6)
    found = nccl_ep.tune(path, shape, algorithms=algorithm, repetitions=8, progress=False)
    assert path.exists() == (rank == 0)
    if rank == 0:
        assert json.loads(path.read_text()) == found
    mine = torch.tensor([entry["microseconds"] for entry in found["entries"]])
    of_rank_0 = mine.clone()
    dist.broadcast(of_rank_0, src=0)
    assert torch.equal(mine, of_rank_0) and bool((mine > 0).all())
    assert [entry["tokens"] for entry in found["entries"]] == [1, 2, 4, 8] * 2
    assert {entry["operation"] for entry in found["entries"]} == {
        f"{algorithm}_dispatch", f"{algorithm}_combine"}
    assert (found["format"], found["version"], found["ranks"]) == ("nccl_ep tuning", 1, size)
    with in_force(found), nccl_ep.EpGroup(2 * size, 64, algorithm=algorithm,
                                          max_tokens_per_rank=8) as group:
        ids = torch.zeros((3, 2), dtype=torch.int64, device=device)
        ids[:, 1] = 1
        tokens = torch.ones((3, 64), dtype=torch.bfloat16, device=device)
        received = group.create_handle(ids).dispatch(tokens)
        if algorithm == "ll":
            assert received.counts.tolist() == ([3 * size] * 2 if rank == 0 else [0, 0])
        else:
            assert bool((received.tokens[:3 * size if rank == 0 else 0] == 1).all())


def test_files_are_merged(tmp_path):
    """For several GPUs and numbers of ranks; of entries for the same the later counts."""
    def written(name, gpu, ranks, *blocks):
        entries = [{"operation": "ll_dispatch", "tokens": 1 << i, "blocks": each, "threads": 512,
                    "send_blocks": 2} for i, each in enumerate(blocks)]
        write(tmp_path / name, document(gpu, ranks, entries))
        return tmp_path / name

    first = written("a", "G", 2, 8, 16)
    second = written("b", "G", 4, 24)
    both = tuning.merge(tmp_path / "both", [first, second])
    assert json.loads((tmp_path / "both").read_text()) == both
    assert [(part["gpu"], part["ranks"]) for part in both["files"]] == [("G", 2), ("G", 4)]
    again = tuning.merge(tmp_path / "again", [tmp_path / "both", written("c", "G", 2, 32)])
    assert [each["blocks"] for each in again["files"][0]["entries"]] == [32, 16]
    (tmp_path / "other").write_text("{}")
    with pytest.raises(ValueError, match="other: is no tuning file of version 1"):
        tuning.merge(tmp_path / "again", [tmp_path / "other"])


@pytest.mark.parametrize(("algorithm", "options"), [
    ("ll", {}), ("ll", {"cast": "fp8"}), ("ll", {"layout": "rank"}),
    pytest.param("ht", {"cast": "fp8"}, marks=pytest.mark.high_throughput)])
def test_a_group_is_tuned_again(world, device, group, monkeypatch, algorithm, options):
    """On the group that exists, which keeps the caller's choices and selector."""
    rank, size = world
    few = [Candidate(4, 256, 4), Candidate(8, 256, 2)]
    monkeypatch.setattr(in_place, "candidates", lambda *_: few)
    ep = group(num_experts=2 * size, hidden=128, dtype=torch.bfloat16, algorithm=algorithm,
               max_tokens_per_rank=4)
    mine = Choice(blocks=1)
    ep.set_choice(f"{algorithm}_combine", mine)
    asked = []
    ep.set_selector(lambda query: asked.append(query))
    found = ep.retune(2, repetitions=2, **options)
    assert asked == [] and ep.choices[f"{algorithm}_combine"] == mine
    assert [entry["tokens"] for entry in found["entries"]] == [1, 2, 4] * 2
    assert found["entries"][0]["row_bytes"] == (128 if "cast" in options else 256)
    assert found["entries"][-1]["row_bytes"] == 256
    ids = torch.zeros((3, 2), dtype=torch.int64, device=device)
    ids[:, 1] = 1
    tokens = torch.ones((3, 128), dtype=torch.bfloat16, device=device)
    ep.create_handle(ids).dispatch(tokens)
    assert len(asked) == 1
    assert ep.selector(asked[0]) is None or ep.selector(asked[0]).blocks in (4, 8)
    ep.retune(2, repetitions=2, **options)


def test_what_a_tuned_group_chooses():
    """The next power of two of tokens, for rows of the size that was measured."""
    chooses = in_place.Tuned(lambda query: Choice(blocks=1) if query.tokens == 7 else None)
    shape = {"blocks": 4, "send_blocks": 2, "threads": 64}
    chooses.learn([{"operation": "ht_combine", "tokens": 4, "row_bytes": 64, **shape},
                   {"operation": "ht_combine", "tokens": 2, "row_bytes": 64, "default": True},
                   {"operation": "ht_combine", "tokens": 16, "row_bytes": 64, "variant": "ht.pull",
                    **shape}])

    def chosen(tokens, row_bytes=64):
        return chooses(nccl_ep.Query("ht_combine", tokens, 2, row_bytes, 2, 8, False))

    assert [chosen(tokens) for tokens in (0, 2, 17)] == [None] * 3 and chosen(4, 32) is None
    assert chosen(3) == chosen(4) == Choice(None, 4, 2, 64)
    assert chosen(5) == Choice("ht.pull", 4, 2, 64) and chosen(7) == Choice(blocks=1)
