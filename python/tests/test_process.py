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
from nccl_ep import tune as function
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
def _on_one_rank(world):
    if world[0] != 0:
        pytest.skip("rank 0 does this")


def test_groups_that_are_left_at_the_end_of_the_interpreter():
    """Neither an error in a destructor nor a wait; a group that is collected before warns."""
    done = run("-W", "always::ResourceWarning", "-c", """
import sys, torch, nccl_ep
sys.kept = nccl_ep.EpGroup(1, 8, max_tokens_per_rank=1)
ids = torch.zeros((1, 1), dtype=torch.int64, device=sys.kept.device)
sys.handle = sys.kept.create_handle(ids)
lost = nccl_ep.EpGroup(1, 8, max_tokens_per_rank=1)
del lost
print("end", flush=True)
""")
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert done.stderr.count("an EpGroup was not closed") == 1
    assert "Error" not in done.stderr and "ignored" not in done.stderr


def test_without_pytorch():
    """The C functions are there; all else says what to install."""
    done = run("-S", "-c", """
import importlib, nccl_ep
assert not nccl_ep.HAVE_TORCH and "EpGroup" not in nccl_ep.__all__
for load in (lambda: nccl_ep.EpGroup, lambda: nccl_ep.tune, lambda: nccl_ep.layers,
             *(lambda name=name: importlib.import_module(f"nccl_ep.{name}")
               for name in ("layers", "autograd", "tuning", "tune"))):
    try:
        load()
    except ImportError as error:
        print(error)
""", PYTHONPATH=str(pathlib.Path(nccl_ep.__file__).parents[1]))
    lines = done.stdout.splitlines()
    assert len(lines) == 7, done.stderr
    assert all(re.match(r"nccl_ep\.\w+ needs PyTorch .*pip install torch", line) for line in lines)


def documented_command() -> list[str]:
    """The words behind the module's name in docs/python.md."""
    text = (ROOT / "docs" / "python.md").read_text()
    [words] = re.findall(r"python3? -m nccl_ep\.tune (.*?)(?:#.*)?$", text, re.M)
    return words.split()


def test_the_command_that_tunes(tmp_path):
    """As documented, but for the sizes: by EpGroup's rendezvous, with lines in a log file."""
    path = tmp_path / "tuning.json"
    sizes = {"--experts": "2", "--hidden": "64", "--top-k": "2", "--tokens": "2"}
    words = documented_command()
    small = [sizes.get(before, word) for before, word in zip(["", *words], words)]
    done = run("-m", "nccl_ep.tune", str(path), *small[1:], "--repetitions", "1")
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert [entry["tokens"] for entry in found["entries"]] == [1, 2] * 2
    assert f"NCCL_EP_TUNING_FILE={path}" in done.stdout
    assert done.stdout.count(" tokens: ") == 4


def test_the_module_is_the_function_too():
    """Importing `nccl_ep.tune` replaces the package's attribute of this name."""
    done = run("-c", "import nccl_ep.tune\ntry: nccl_ep.tune('f', 3)\n"
                     "except TypeError as error: print(error)")
    assert done.stdout == "shape: must be a MoeShape, not int\n", done.stderr
    assert callable(function)


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
