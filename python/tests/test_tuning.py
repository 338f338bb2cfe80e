"""Tuning: the candidates, the choice of the best, and the file."""

import dataclasses
import errno
import json
import os
import pathlib
import sys

import pytest
import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep import Choice, tuning
from nccl_ep.tuning import Rows, in_place, search
from nccl_ep.tuning.__main__ import main
from nccl_ep.tuning.candidates import candidates, tried
from nccl_ep.tuning.files import VARIABLE, document, in_force, write
from nccl_ep.tuning.ranks import Ranks
from nccl_ep.tuning.search import best
from problems import Problem, default_dtype

FEW = [Choice(None, 4, 4, 256), Choice(None, 8, 2, 256)]


@pytest.fixture
def shape(size) -> nccl_ep.MoeShape:
    return nccl_ep.MoeShape(num_experts=size, hidden=64, top_k=1, max_tokens_per_rank=1)


def test_candidates_fit_the_gpu():
    for algorithm in ("ll", "ht"):
        for multiprocessors in (1, 2, 20, 132):
            found = candidates(algorithm, multiprocessors, 0)
            assert len(set(found)) == len(found)
            assert max(each.blocks for each in found) == multiprocessors
            assert all(1 <= each.send_blocks <= each.blocks for each in found)
            assert all(each.threads % 32 == 0 for each in found)
        assert max(each.blocks for each in candidates(algorithm, 132, 20)) == 20


def _alike(*choices):
    """Candidates that are the same for both operations."""
    return [(choice, choice) for choice in (None, *choices)]


def test_variants_of_rows():
    shapes = [Choice(blocks=8), Choice(blocks=16)]

    def names(algorithm, rows, exact=False):
        pairs = tried(algorithm, shapes, rows, exact)
        assert pairs[0] == (None, None) and len(set(pairs)) == len(pairs)
        return [(each.variant if each else None, other.variant) for each, other in pairs[1:]]

    own, direct, ring = [(None, None)] * 2, [("ht.direct", "ht.pull")] * 3, [("ht.ring", "ht.ring")] * 3
    assert names("ll", Rows()) == names("ll", Rows(layout="rank"), exact=True) == names("ht", Rows(), exact=True) == own
    assert names("ll", Rows(), exact=True) == own + [(None, "ll.exact")] * 3
    assert names("ht", Rows(memory="symmetric")) == ring + direct
    assert not Rows(layout="view").exist_in("ht") and not Rows(memory="symmetric").exist_in("ll")
    with pytest.raises(ValueError, match="layout: must be one of expert, rank, view, not 'row'"):
        Rows(layout="row")


@pytest.mark.parametrize(("of_exact", "variant"), [(7.0, "ll.exact"), (9.9, None)])
def test_low_latency_sums_alike_for_all_numbers_of_tokens(of_exact, variant):
    """Though one of them would be faster otherwise."""
    pairs = [(None, None), (Choice(blocks=8), Choice(blocks=8)), (None, Choice("ll.exact"))]
    times = torch.tensor([[[5.0, 10.0]] * 2, [[5.0, 10.0], [5.0, 9.0]], [[5.0, of_exact], [5.0, of_exact + 2.5]]])
    entries = best("ll", [1, 2], pairs, times)[2:]
    assert {entry.get("variant") for entry in entries} == {variant}
    assert [entry["default_microseconds"] for entry in entries] == [10.0, 10.0]
    assert document("G", 2, entries).get("choices", []) == (entries if variant else [])


def test_the_librarys_own_choice_stays_unless_another_is_clearly_faster():
    pairs = _alike(Choice(None, 8, 8, 256), Choice(None, 16, 4, 512))
    # [candidate, number of tokens, operation]
    times = torch.tensor([[[10.0, 10.0], [10.0, 10.0]], [[9.0, 9.9], [11.0, 20.0]],
                          [[8.0, 12.0], [12.0, 5.0]]])
    entries = best("ll", [1, 2], pairs, times)
    names = [(entry["operation"], entry["tokens"], entry.get("blocks", "own")) for entry in entries]
    assert names == [("ll_dispatch", 1, 16), ("ll_dispatch", 2, "own"),
                     ("ll_combine", 1, "own"), ("ll_combine", 2, 16)]
    assert entries[0]["microseconds"] == 8.0 and entries[0]["default_microseconds"] == 10.0
    assert entries[1]["default"] is True


def test_the_slowest_rank_counts(rank, size, comm):
    times = torch.tensor([float(rank), 1.0 - rank])
    assert Ranks(comm).slowest(times).tolist() == [size - 1, 1.0]


def test_a_file_is_in_force_for_a_while(monkeypatch):
    monkeypatch.setenv(VARIABLE, "before.json")
    with in_force(document("G", 2, [{"tokens": 1}])):
        path = pathlib.Path(os.environ[VARIABLE])
        assert json.loads(path.read_text())["entries"] == [{"tokens": 1}]
    assert not path.exists() and os.environ[VARIABLE] == "before.json"
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ZeroDivisionError), in_force(None):
        assert VARIABLE not in os.environ
        1 / 0
    assert VARIABLE not in os.environ


def test_the_librarys_sample_is_what_is_written(tmp_path):
    """A unit test of the library reads the same file."""
    times = torch.tensor([[[15.25, 16.0]], [[14.5, 17.0]]])
    path = tmp_path / "times.json"
    write(path, document("NVIDIA H200", 4, best("ll", [8], _alike(Choice(None, 32, 8, 512)), times), num_experts=256,
                         hidden=7168, top_k=8, dtype="bfloat16", nccl="2.28.9"))
    sample = pathlib.Path(__file__).parent / "data" / "tuning.json"
    assert path.read_text() == sample.read_text()


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "times.json"
    for number in (1, 2):
        write(str(path), {"number": number})
        assert json.loads(path.read_text()) == {"number": number}
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write(tmp_path / "folder", {})
    assert sorted(os.listdir(tmp_path)) == ["folder", "times.json"]


def test_torchs_defaults_do_not_matter(shape, tmp_path, monkeypatch):
    """Neither torch's default type nor its default device affects tuning."""
    monkeypatch.setattr(search, "candidates", lambda *_: [])
    with default_dtype(torch.bfloat16), torch.device("meta"):
        found = nccl_ep.tune(tmp_path / "times.json", shape, repetitions=1, progress=False)
    assert [entry["default"] for entry in found["entries"]] == [True, True]


def test_what_cannot_be_tuned(shape, tmp_path):
    nothing = dataclasses.replace(shape, max_tokens_per_rank=0)
    many = dataclasses.replace(shape, top_k=shape.num_experts + 1)
    for arguments, text in (((shape, "mid"), "algorithms: must be 'll' or 'ht', not 'mid'"),
                            ((shape, ["ll", "l"]), "not 'l'"),
                            ((nothing, "ll"), "max_tokens_per_rank: must be positive"),
                            ((many, "ll"), "top_k: must be at most num_experts"),
                            ((shape, "ll", Rows(memory="symmetric")), "rows: none of them exists in ll")):
        with pytest.raises(ValueError, match=text):
            nccl_ep.tune(tmp_path / "times.json", arguments[0], algorithms=arguments[1], rows=arguments[2:] or Rows())


@pytest.mark.parametrize("place", ["no/such/folder/times.json", "."])
def test_a_file_that_cannot_be_written(shape, tmp_path, monkeypatch, place):
    """Every rank reports it with the caller's path before anything is measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "search", None)
    with pytest.raises(OSError, match=f"^{place}: cannot be written: "):
        nccl_ep.tune(place, shape)
    assert os.listdir(tmp_path) == []


def test_a_file_that_cannot_be_written_any_more(comm):
    """Such as on a disk that has filled up meanwhile: no rank waits for rank 0."""
    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="times.json: cannot be written: No space left"):
        Ranks(comm).on_first(full, "times.json")


def test_tuning_end_to_end(rank, size, device, monkeypatch, tmp_path, algorithm):
    """All ranks measure, agree and return the same; rank 0 writes it; a group uses the file."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if device.type == "cpu":
        monkeypatch.setattr(search, "candidates", lambda *_: FEW)
    path = tmp_path / "times.json"
    shape = nccl_ep.MoeShape(num_experts=2 * size, hidden=64, top_k=2, max_tokens_per_rank=6)
    found = nccl_ep.tune(path, shape, algorithms=algorithm, repetitions=8, progress=False,
                         rows=(Rows(), Rows(layout="rank"), Rows(memory="symmetric")))
    assert path.exists() == (rank == 0)
    if rank == 0:
        assert json.loads(path.read_text()) == found
    mine = torch.tensor([entry["microseconds"] for entry in found["entries"]])
    of_rank_0 = mine.clone()
    dist.broadcast(of_rank_0, src=0)
    assert torch.equal(mine, of_rank_0) and bool((mine > 0).all())
    for entries in (found["entries"], found["choices"]):
        assert [entry["tokens"] for entry in entries] == [1, 2, 4, 8] * 2
    condition = ("layout", "rank") if algorithm == "ll" else ("memory", "symmetric")
    assert {(entry["row_bytes"], entry[condition[0]]) for entry in found["choices"]} == {(128, condition[1])}
    assert {entry["operation"] for entry in found["entries"]} == {
        f"{algorithm}_dispatch", f"{algorithm}_combine"}
    assert (found["format"], found["version"], found["ranks"]) == ("nccl_ep tuning", 1, size)
    with in_force(found), nccl_ep.EpGroup(2 * size, 64, algorithm=algorithm,
                                          max_tokens_per_rank=8) as group:
        ids = torch.tensor([[0, 1]] * 3, device=device)
        tokens = torch.ones((3, 64), dtype=torch.bfloat16, device=device)
        received = group.create_handle(ids).dispatch(tokens)
        if algorithm == "ll":
            assert received.counts.tolist() == ([3 * size] * 2 if rank == 0 else [0, 0])
        else:
            assert bool((received.tokens[:3 * size if rank == 0 else 0] == 1).all())


def test_other_rows_are_compared_with_what_they_get_otherwise(shape, tmp_path, monkeypatch):
    """A group with the file runs them as plain rows where it has nothing for them."""
    plain = {"operation": "ll_dispatch", "tokens": 1, "blocks": 1, "send_blocks": 1, "threads": 256}
    seen = []

    def found(group, work, *_):
        seen.append((work[2], json.loads(pathlib.Path(os.environ[VARIABLE]).read_text())["entries"]))
        return [{**plain, "row_bytes": 128, "layout": work[2].layout}]

    monkeypatch.setattr(search, "search", found)
    nccl_ep.tune(tmp_path / "times.json", shape, rows=(Rows(layout="rank"), Rows()), progress=False)
    assert seen == [(Rows(), []), (Rows(layout="rank"), [plain])]


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
    ("ll", {"cast": "fp8"}), ("ll", {"layout": "rank"}), ("ll", {"layout": "view"}), ("ll", {"exact": True}),
    pytest.param("ht", {"cast": "fp8"}, marks=pytest.mark.high_throughput),
    pytest.param("ht", {"memory": "symmetric"}, marks=pytest.mark.high_throughput)])
def test_a_group_is_tuned_again(size, device, group, monkeypatch, algorithm, options):
    """On the group that exists, which keeps the caller's choices and selector."""
    monkeypatch.setattr(in_place, "candidates", lambda *_: FEW)
    ep = group(num_experts=2 * size, hidden=128, dtype=torch.bfloat16, algorithm=algorithm,
               max_tokens_per_rank=3)
    if "memory" in options:
        ep.heap(2048 * size)  # two tensors of the rows, not three
    mine = Choice(blocks=1)
    ep.set_choice(f"{algorithm}_combine", mine)
    asked = []
    ep.set_selector(lambda query: asked.append(query))
    found = ep.retune(2, repetitions=2, **options)
    assert asked == [] and ep.choices[f"{algorithm}_combine"] == mine
    entries = found["choices"]
    assert [entry["tokens"] for entry in entries] == [1, 2, 4] * 2 and found["entries"] == []
    assert entries[0]["row_bytes"] == (128 if "cast" in options else 256)
    assert entries[-1]["row_bytes"] == 256
    condition = ("layout", "expert") if algorithm == "ll" else ("memory", "plain")
    assert all(entry[condition[0]] == options.get(*condition) for entry in entries)
    ids = torch.tensor([[0, 1]] * 3, device=device)
    tokens = torch.ones((3, 128), dtype=torch.bfloat16, device=device)
    ep.create_handle(ids).dispatch(tokens)
    for wrong in ({"top_k": 2 * size + 1}, {"num_sms": -1}, {"repetitions": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: must be "):
            ep.retune(**{"top_k": 2, **wrong})
    assert len(asked) == 1
    assert ep.selector(asked[0]) is None or ep.selector(asked[0]).blocks in (4, 8)
    ep.retune(2, repetitions=2, **options)


def test_what_a_tuned_group_chooses():
    """The next power of two of tokens, for rows of the size and memory that was measured."""
    chooses = in_place.Tuned(lambda query: Choice(blocks=1) if query.tokens == 7 else None)
    shape = {"blocks": 4, "send_blocks": 2, "threads": 64}
    rows = {"operation": "ht_combine", "row_bytes": 64, "memory": "plain"}
    exact = {"operation": "ll_combine", "row_bytes": 64, "layout": "expert", "variant": "ll.exact"}
    chooses.learn([{**rows, "tokens": 4, **shape}, {**rows, "tokens": 2, "default": True},
                   {**rows, "tokens": 16, "memory": "symmetric", "variant": "ht.pull"},
                   {**exact, "tokens": 4, **shape}])

    def chosen(tokens, row_bytes=64, symmetric=False, operation="ht_combine"):
        return chooses(nccl_ep.Query(operation, tokens, 2, row_bytes, 2, 8, symmetric))

    assert [chosen(tokens) for tokens in (0, 2, 5)] == [None] * 3 and chosen(4, 32) is None
    assert chosen(3) == chosen(4) == Choice(None, 4, 2, 64)
    assert chosen(5, symmetric=True) == Choice("ht.pull") and chosen(7) == Choice(blocks=1)
    assert chosen(4, operation="ll_combine") == Choice("ll.exact", 4, 2, 64)
    assert chosen(5, operation="ll_combine") == Choice("ll.exact")


def test_a_file_names_a_variant(world, group, device, nodes):
    """The group takes it where no other is chosen."""
    size = world[1]
    if size < 2 or len(set(nodes)) > 1:
        return
    facts = {"num_experts": 2 * size, "hidden": 64, "dtype": torch.float32, "max_tokens_per_rank": 20}
    with in_force(None):
        own = group(**facts)
    gpu, _ = search.device_facts(own.runtime)
    with in_force(document(gpu, size, [
            {"operation": "ll_combine", "tokens": 1, "row_bytes": 256, "layout": "expert", "variant": "ll.exact"}])):
        tuned = group(**facts)
    problem = Problem(*world, top_k=2, experts_per_rank=2, hidden=64, device=device)

    def combined(ep, choice=None):
        with ep.create_handle(problem.topk_idx) as handle:
            return handle.combine(handle.dispatch(problem.tokens).tokens, problem.weights, choice=choice)

    exact, reduced = (combined(own, Choice(name)) for name in ("ll.exact", "ll.reduce"))
    assert not torch.equal(exact, reduced)
    # For any number of tokens, and also where a launch shape is chosen.
    assert torch.equal(combined(tuned), exact) and torch.equal(combined(tuned, Choice(blocks=1)), exact)
    assert torch.equal(combined(tuned, Choice("ll.reduce")), reduced)


def test_what_was_measured_is_drawn(tmp_path, monkeypatch, capsys):
    entries = [{"operation": "ht_dispatch", "tokens": tokens, "row_bytes": 64, "memory": "symmetric",
                "variant": "ht.direct", "microseconds": 2.0 * tokens, "default_microseconds": 3.0} for tokens in (1, 2)]
    plain = {"operation": "ll_combine", "tokens": 1, "blocks": 4, "send_blocks": 2, "threads": 64,
             "microseconds": 1.0, "default_microseconds": 1.5}
    write(tmp_path / "times.json", document("G", 2, [plain, *entries]))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    main(["show", str(tmp_path / "times.json"), "--plot", str(tmp_path / "x.png")])
    said = capsys.readouterr().out
    assert said.startswith("G, 2 ranks\n\n| operation ") and "pip install matplotlib" in said
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line.startswith("| ")]
    assert rows[1:] == [["ll_combine", "all", "1", "1.5", "1.0", "4 blocks of 64, 2 send"],
                        ["ht_dispatch", "64 bytes, symmetric", "1", "3.0", "2.0", "ht.direct"],
                        ["ht_dispatch", "64 bytes, symmetric", "2", "3.0", "4.0", "ht.direct"]]
    main(["merge", str(tmp_path / "all"), str(tmp_path / "times.json")])
    assert capsys.readouterr().out == "G, 2 ranks: 3 entries\n"
    (tmp_path / "list.json").write_text("[]")
    for name, text in (("list.json", "is no tuning file of version 1"), ("none.json", "No such file")):
        with pytest.raises(SystemExit, match=f"nccl_ep.tuning show: .*{text}"):
            main(["show", str(tmp_path / name)])
