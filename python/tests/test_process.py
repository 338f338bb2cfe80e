"""What needs a Python of its own: its end, one without PyTorch, and the command that tunes."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import nccl_ep
from documents import ROOT
from nccl_ep.tuning.progress import Progress


def run(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """A Python as a job of one rank; torch.distributed is not in use there."""
    launchers = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "MASTER_")
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(launchers)}
    return subprocess.run((sys.executable, *words), timeout=120, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env={**environment, "RANK": "0", "WORLD_SIZE": "1", **settings})


@pytest.fixture(autouse=True)
def _once(world):
    if world[1] != 1:
        pytest.skip("the run with one rank does this")


def test_groups_that_are_left_at_the_end_of_the_interpreter():
    """Neither an error in a destructor nor a wait; a group that is collected before warns."""
    done = run("-W", "always::ResourceWarning", "-c", """
import sys, torch, nccl_ep
sys.kept = nccl_ep.EpGroup(1, 8, max_tokens_per_rank=1)
ids = torch.zeros((1, 1), dtype=torch.int64, device=sys.kept.device)
sys.handle = sys.kept.create_handle(ids)
lost = nccl_ep.EpGroup(1, 8, max_tokens_per_rank=1)
del lost
import nccl_ep.tuning.__main__
try: nccl_ep.tune("times.json", 3)
except TypeError as error: print(error, flush=True)
""")
    assert (done.returncode, done.stdout) == (0, "shape: must be a MoeShape, not int\n"), done.stderr
    assert done.stderr.count("an EpGroup was not closed") == 1
    assert "Error" not in done.stderr and "ignored" not in done.stderr


def test_without_pytorch():
    """The C functions are there; all else says what to install."""
    done = run("-S", "-c", """
import importlib, nccl_ep
assert not nccl_ep.HAVE_TORCH and "EpGroup" not in nccl_ep.__all__
for load in (lambda: nccl_ep.EpGroup, lambda: nccl_ep.tune, lambda: nccl_ep.layers,
             *(lambda name=name: importlib.import_module(f"nccl_ep.{name}")
               for name in ("layers", "autograd", "tuning", "tuning.__main__"))):
    try:
        load()
    except ImportError as error:
        print(error)
""", PYTHONPATH=str(pathlib.Path(nccl_ep.__file__).parents[1]))
    lines = done.stdout.splitlines()
    assert len(lines) == 7, done.stderr
    assert all(re.match(r"nccl_ep\.\w+ needs PyTorch .*pip install torch", line) for line in lines)


# Without torch, which takes seconds to import.
_GROUPS = """
import nccl_ep
library = nccl_ep.NCCLLibrary()
comm = library.ncclCommInitRank(1, library.ncclGetUniqueId(), 0)
config = nccl_ep.ncclEpGroupConfig_t(version=1, num_experts=1, max_tokens_per_rank=1,
                                     token_size_bytes=16)
for _ in range(2):
    library.ncclEpGroupDestroy(library.ncclEpCreateGroup(comm, config))
"""
_LINE = re.compile(r"^[^.:]+:(\d+):\d+ \[0\] NCCL_EP INFO NCCL EP version \d+\.\d+\.\d+\+cuda\S+, "
                   r"(host|cuda) backend, rank 0 of 1 on 1 node, NCCL \S+ from /\S+, low latency, "
                   r"1 experts, rows of 16 bytes, at most 1 tokens of a rank, windows [^,]+, "
                   r"no tuning file$", re.M)


@pytest.mark.parametrize("level", ["INFO", "trace", "WARN", "VERSION", "NONE"])
def test_lines_about_groups(level):
    """One for each from INFO on; the version alone, once, at VERSION."""
    printed = run("-c", _GROUPS, NCCL_DEBUG=level, NCCL_EP_TUNING_FILE="").stderr
    wanted = 2 if level in ("INFO", "trace") else 0
    assert len(_LINE.findall(printed)) == printed.count("NCCL_EP INFO") == wanted, printed
    alone = re.findall(r"^NCCL EP version \S+$", printed, re.M)
    assert len(alone) == (1 if level == "VERSION" else 0)


def test_lines_in_a_file(tmp_path):
    """`%p` is the process; warnings go there, too."""
    run("-c", _GROUPS + "try: library.ncclEpCreateGroup(None, None)\n"
        "except nccl_ep.NcclEpError: pass",
        NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(tmp_path / "%p.%%.log"), NCCL_EP_TUNING_FILE="")
    [path] = tmp_path.iterdir()
    text = path.read_text()
    assert [f"{number}.%.log" for number, _ in _LINE.findall(text)] == [path.name] * 2, text
    assert text.count("NCCL_EP WARN") == 1


def documented_command() -> list[str]:
    """The words behind the module's name in docs/python.md."""
    text = (ROOT / "docs" / "python.md").read_text()
    [words] = re.findall(r"python3? -m nccl_ep\.tuning (.*?)(?:#.*)?$", text, re.M)
    return words.split()


def test_the_command_that_tunes(tmp_path):
    """As documented, but for the sizes: by EpGroup's rendezvous, with lines in a log file."""
    path = tmp_path / "tuning.json"
    sizes = {"--experts": "2", "--hidden": "64", "--top-k": "2", "--tokens": "2"}
    words = documented_command()
    small = [sizes.get(before, word) for before, word in zip(["", *words], words)]
    done = run("-m", "nccl_ep.tuning", str(path), *small[1:], "--repetitions", "1")
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert [entry["tokens"] for entry in found["entries"]] == [1, 2] * 2
    assert f"NCCL_EP_TUNING_FILE={path}" in done.stdout
    assert done.stdout.count(" tokens: ") == 4


class Clock:
    """Seconds that pass only when told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_without_tqdm(monkeypatch, capsys, terminal):
    """A bar on a terminal, lines elsewhere, and nothing if it is quick."""
    clock = Clock()
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setattr("nccl_ep.tuning.progress.time", clock)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    for seconds in (0.1, 8.0):
        bar = Progress(True, "ll", 4)
        for _ in range(4):
            clock.now += seconds
            bar.step()
        bar.close()
    Progress(False, "ht", 1).step()
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    if terminal:
        assert [line.split()[-3] for line in lines if line] == ["1/4,", "2/4,", "3/4,", "4/4,"]
    else:
        assert lines == ["tuning ll: 2/4, 16 s", "tuning ll: 4/4, 32 s"]


def test_progress_by_tqdm(monkeypatch):
    """Its notebook or text bar gets every step, and is closed."""
    calls = []

    class Bar:
        def __init__(self, **settings):
            calls.append((settings["total"], settings["desc"]))

        def update(self):
            calls.append("update")

        def close(self):
            calls.append("close")

    module = type(sys)("tqdm.auto")
    module.tqdm = Bar
    monkeypatch.setitem(sys.modules, "tqdm", type(sys)("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", module)
    bar = Progress(True, "ht", 1)
    bar.step()
    bar.close()
    assert calls == [(1, "tuning ht"), "update", "close"]
