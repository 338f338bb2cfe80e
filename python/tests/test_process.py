"""What needs a Python of its own: its end, one without PyTorch, and the command that tunes."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from unittest import mock

import pytest

import nccl_ep
from documents import ROOT
from fresh import environment
from nccl_ep.tuning.progress import Progress

pytestmark = pytest.mark.usefixtures("alone")


def run(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """A Python as a job of one rank."""
    return subprocess.run((sys.executable, *words), timeout=120, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**environment(), **settings})


def test_groups_that_are_left_at_the_end_of_the_interpreter(fresh):
    """Neither an error in a destructor nor a wait; a group that is collected before warns. A process that nothing has
    launched, such as one of a terminal or a notebook, is alone. Torch's compiler is not loaded, as it takes seconds.
    """
    done = fresh("-c", """
import os, sys, warnings
warnings.simplefilter("always", ResourceWarning)
for name in ("RANK", "WORLD_SIZE"): del os.environ[name]
import torch, nccl_ep
sys.kept = nccl_ep.EpGroup(1, 8, max_tokens_per_rank=1)
ids = torch.zeros((1, 1), dtype=torch.int64, device=sys.kept.device)
sys.handle = sys.kept.create_handle(ids)
lost = nccl_ep.EpGroup(1, 8, max_tokens_per_rank=1)
del lost
import nccl_ep.tuning.__main__
print(sys.kept.rank, sys.kept.world_size, "torch._dynamo" in sys.modules)
try: nccl_ep.tune("times.json", 3)
except TypeError as error: print(error, flush=True)
""")
    assert (done.returncode, done.stdout) == (0, "0 1 False\nshape: must be a MoeShape, not int\n"), done.stderr
    assert done.stderr.count("an EpGroup was not closed") == 1
    assert "Error" not in done.stderr and "ignored" not in done.stderr


def test_without_pytorch():
    """The C functions are there; all else says what to install."""
    done = run("-S", "-c", """
import importlib, nccl_ep
from nccl_ep import *
assert not HAVE_TORCH and NCCLLibrary and "EpGroup" not in globals() and "EpGroup" not in nccl_ep.__all__
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
    assert all(re.match(r"nccl_ep\.[\w.]+ needs PyTorch .*pip install torch", line) for line in lines)


_LATER = """
int ncclEpGetVersion(int* version) { *version = 200; return 0; }
int ncclEpCreateGroup(void** group, void* comm, const void* config) { return 4; }
int ncclEp%s(void) { return 4; }
"""


@pytest.mark.parametrize("function, package", [
    ("InitHandle", "The package nccl.ep .pip install nccl-extensions. serves it"),
    ("TensorGetData", "The nccl_ep package of NCCL 2.30 serves it")])
@pytest.mark.parametrize("how", ["NCCL_EP_LIBRARY", "NCCL_HOME", "LD_LIBRARY_PATH"])
def test_a_library_of_a_later_generation(tmp_path, function, package, how):
    """Its calls of the same names take other arguments, so they are not made."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path / "lib"
    folder.mkdir()
    library = folder / "libnccl_ep.so"
    subprocess.run((compiler, "-shared", "-fPIC", "-xc", "-", "-o", str(library)), check=True,
                   input=_LATER % function, text=True)
    places = {"NCCL_EP_LIBRARY": library, "NCCL_HOME": tmp_path, "LD_LIBRARY_PATH": folder}
    beside = pathlib.Path(nccl_ep.__file__).parent / "lib" / "libnccl_ep.so"
    if beside.exists() and how != "NCCL_EP_LIBRARY":
        pytest.skip("the package brings its own")
    found = {"NCCL_EP_LIBRARY": "which NCCL_EP_LIBRARY names", "NCCL_HOME": "found by NCCL_HOME",
             "LD_LIBRARY_PATH": "which the loader has found for libnccl_ep.so"}[how]
    done = run("-c", "import nccl_ep; nccl_ep.NCCLLibrary()",
               **{"NCCL_EP_LIBRARY": "", how: str(places[how])})
    text = done.stderr.splitlines()[-1]
    assert re.fullmatch(rf"RuntimeError: {library}, {found}, is NCCL EP of a later generation "
                        rf".0\.2\.0.: it has ncclEp{function}, .*{package}; .*", text), text


def test_two_copies_of_nccl(tmp_path, fresh):
    """The one that NCCL_EP_NCCL_LIBRARY names is used by all, even behind one that is global; a
    communicator of the other one is told of with both files."""
    own = os.environ.get("NCCL_EP_NCCL_LIBRARY", "")
    if not own.endswith("libncclep_hostsim.so"):
        pytest.skip("of the CPU stand-ins")
    other = tmp_path / "libother.so"
    shutil.copy(own, other)
    code = """
import ctypes, os, torch
ctypes.CDLL(os.environ["OWN"], mode=ctypes.RTLD_GLOBAL)
import nccl_ep
with nccl_ep.EpGroup(2, 32, algorithm="ht") as group:
    tokens = torch.ones((3, 32), dtype=torch.bfloat16)
    with group.create_handle(torch.zeros((3, 1), dtype=torch.int64)) as handle:
        assert torch.equal(handle.combine(handle.dispatch(tokens).tokens), tokens)
chosen = os.environ["NCCL_EP_NCCL_LIBRARY"]
wrong = ctypes.CDLL(os.environ["OWN"] if chosen else os.environ["OTHER"])
id, comm = nccl_ep.nccl_wrapper.ncclUniqueId(), nccl_ep.ncclComm_t()
assert wrong.ncclGetUniqueId(ctypes.byref(id)) == 0
assert wrong.ncclCommInitRank(ctypes.byref(comm), 1, id, 0) == 0
library = nccl_ep.NCCLLibrary()
config = nccl_ep.ncclEpGroupConfig_t(version=1, num_experts=1, max_tokens_per_rank=1,
                                     token_size_bytes=16)
for call in (lambda: nccl_ep.EpGroup(2, 32, algorithm="ht", comm=comm),
             lambda: library.ncclEpCreateGroup(comm, config)):
    try: call()
    except nccl_ep.InvalidArgumentError as error: print(error, flush=True)
"""
    for chosen, used, unused in ((str(other), other, own), ("", own, other)):
        done = fresh("-c", code, NCCL_EP_NCCL_LIBRARY=chosen, OWN=own, OTHER=str(other))
        assert done.stdout.count("\n") == 2, done.stderr
        first, second = done.stdout.splitlines()
        assert first.startswith("ncclCommCount: of") and second.startswith("ncclEpCreateGroup: ")
        for line in (first, second):
            assert (f"of several NCCLs in this process {os.path.realpath(used)} is used, and a "
                    f"communicator of {os.path.realpath(unused)} is invalid there") in line, line


def test_an_nccl_that_cannot_be_loaded():
    """The library says whose setting that is, as the package does."""
    done = run("-c", """
import nccl_ep, os
library = nccl_ep.NCCLLibrary()
os.environ["NCCL_EP_NCCL_LIBRARY"] = "/nowhere/libnccl.so.2"
config = nccl_ep.ncclEpGroupConfig_t(version=1)
try: library.ncclEpCreateGroup(nccl_ep.ncclComm_t(16), config)
except nccl_ep.NcclSystemError as error: print(error)
""")
    assert done.stdout.startswith("ncclEpCreateGroup: NCCL_EP_NCCL_LIBRARY: cannot be loaded: "
                                  "/nowhere/libnccl.so.2: cannot open"), done.stderr


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
                   r"waits of at most \d+ ms, combines (?:reduce|exact), no tuning file$", re.M)


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
    [words] = re.findall(r"python3? -m nccl_ep\.tuning (?!merge|show)(.*?)(?:#.*)?$", text, re.M)
    return words.split()


def test_the_command_that_tunes(tmp_path, fresh):
    """As documented, but for the sizes: by EpGroup's rendezvous, with lines in a log file."""
    path = tmp_path / "tuning.json"
    sizes = {"--experts": "2", "--hidden": "64", "--top-k": "2", "--tokens": "2"}
    words = documented_command()
    small = [sizes.get(before, word) for before, word in zip(["", *words], words)]
    done = fresh("-m", "nccl_ep.tuning", str(path), *small[1:], "--repetitions", "1")
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert [entry["tokens"] for entry in found["entries"]] == [1, 2] * 2
    assert f"NCCL_EP_TUNING_FILE={path}" in done.stdout
    assert len(re.findall(r"^\| ll_(?:dispatch|combine) ", done.stdout, re.M)) == 4


def test_progress_without_tqdm(monkeypatch, capsys):
    """Lines, and nothing if it is quick."""
    clock = mock.Mock(**{"monotonic.return_value": 0.0})
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setattr("nccl_ep.tuning.progress.time", clock)
    for seconds in (0.1, 8.0):
        bar = Progress(True, "ll", 4)
        for _ in range(4):
            clock.monotonic.return_value += seconds
            bar.step()
        bar.close()
    Progress(False, "ht", 1).step()
    assert capsys.readouterr().err.splitlines() == ["tuning ll: 2/4, 16 s", "tuning ll: 4/4, 32 s"]


def test_progress_by_tqdm(monkeypatch):
    """Its notebook or text bar gets every step, and is closed."""
    module = mock.MagicMock()
    for name in ("tqdm", "tqdm.auto"):
        monkeypatch.setitem(sys.modules, name, module)
    bar = Progress(True, "ht", 1)
    bar.step()
    bar.close()
    (_, _, settings), *calls = module.tqdm.mock_calls
    assert (settings["total"], settings["desc"]) == (1, "tuning ht")
    assert calls == [mock.call().update(), mock.call().close()]
