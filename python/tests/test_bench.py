"""`python -m nccl_ep bench`: what it measures, its file, tables and pictures. The wheel's test runs it as a program."""

import json
import shutil
import sys

import pytest

from nccl_ep import bench
from nccl_ep.__main__ import main

_SETTINGS = bench.Settings(("ll", "ht"), (1, 3), 8, 64, 2, "bfloat16", 0, 2)
_SEEN = [bench.Seen("H", {("ht", 8): (3.0, 4.0), ("ll", 1): (1.0, 5.25)}),
         bench.Seen("H", {("ht", 8): (2.0, 6.0), ("ll", 1): None})]
_TABLE = """\
| mode | tokens | a dispatch | a combine | b dispatch | b combine |
|------|-------:|-----------:|----------:|-----------:|----------:|
| ll   |      1 |            |           |        1.0 |       5.2 |
| ht   |      8 |        3.0 |       6.0 |        3.0 |       4.0 |"""


@pytest.fixture
def files(tmp_path) -> list[str]:
    """Of two ranks, one of which saw wrong rows, and of one."""
    for name, seen in (("a", _SEEN), ("b", _SEEN[:1])):
        (tmp_path / f"{name}.json").write_text(json.dumps(bench.document(_SETTINGS, seen)))
    return [str(tmp_path / "a.json"), str(tmp_path / "b.json")]


@pytest.mark.high_throughput
def test_each_mode_and_number_of_tokens_is_timed(rank, size):
    seen = bench.measure(rank, size, _SETTINGS._replace(experts=2 * size))
    assert list(seen.times) == [("ll", 1), ("ll", 3), ("ht", 1), ("ht", 3)]
    assert all(times and min(times) > 0 for times in seen.times.values())


def test_rows_that_are_wrong_are_noticed(rank, size, monkeypatch):
    monkeypatch.setattr("nccl_ep.tuning.measure.Workload.combine", lambda load: load.home.zero_())
    assert bench.measure(rank, size, _SETTINGS._replace(modes=("ll",), experts=2 * size)).times["ll", 1] is None


def test_the_slowest_rank_counts():
    found = bench.document(_SETTINGS, _SEEN)
    assert found["rows"] == [{"mode": "ht", "tokens": 8, "dispatch": 3.0, "combine": 6.0}]
    assert (found["ranks"], found["gpu"], found["experts"]) == (2, "H", 8)


def test_files_side_by_side(files, capsys):
    assert bench.show(files, None) == 0
    assert capsys.readouterr().out == _TABLE + "\n"


def test_files_of_one_name(files, tmp_path, capsys):
    """Of two machines, say."""
    other = tmp_path / "other"
    other.mkdir()
    bench.show([files[1], shutil.copy(files[1], other)], None)
    assert f"| b dispatch | b combine | {other / 'b.json'} dispatch |" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "nccl_ep tuning"}'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SystemExit, match=r"bench: .*x\.json: "):
        bench.show([str(tmp_path / "x.json")], None)


def test_a_picture_wants_matplotlib(files, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        bench.show(files, str(tmp_path / "x.svg"))


@pytest.mark.parametrize("words, text", [
    (["--tokens", "1,many"], "--tokens: invalid numbers value: '1,many'"),
    (["--experts", "4"], "--top-k: expected at most 4 experts"),
    (["--plot", "x.svg"], "--plot: expected --show FILE")])
def test_the_command_says_what_it_expects(monkeypatch, capsys, words, text):
    monkeypatch.setattr(sys, "argv", ["nccl_ep", "bench", *words])
    with pytest.raises(SystemExit):
        main()
    assert text in capsys.readouterr().err


def test_where_it_cannot_start(tmp_path):
    with pytest.raises(SystemExit, match="bench: .*No such file or directory"):
        bench.run(_SETTINGS, 1, stand_ins=True, file=str(tmp_path / "nowhere" / "times.json"))
    with pytest.raises(SystemExit, match="bench: ranks: must be 1 or more, not 0"):
        bench.run(_SETTINGS, 0, stand_ins=True, file=None)
