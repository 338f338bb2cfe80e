"""`python -m nccl_ep doctor`: what it finds here, and what it says of what is wrong."""

import os
import re
import subprocess
import sys

import pytest

from documents import ROOT
from nccl_ep import __version__, doctor
from nccl_ep.nccl_wrapper import NCCLLibrary


def test_what_is_here(library, device):
    lines = list(doctor.report())
    assert lines[0].startswith(f"ok nccl_ep {__version__}, Python 3.")
    assert any(line.startswith("ok libnccl_ep ") and library.path in line for line in lines)
    assert any(line.startswith("ok PyTorch ") for line in lines)
    if device.type == "cpu":
        assert "-- operations run on the CPU" in lines
    else:
        assert any(line.startswith("ok GPU 0: ") for line in lines)


@pytest.mark.parametrize("name, value, text", [
    ("NCCL_EP_TIMEOUT", "5", "is not read by anything; is NCCL_EP_TIMEOUT_MS meant?"),
    ("NCCL_EP_QUITE_ELSE", "5", "is not read by anything"),
    ("NCCL_EP_TIMEOUT_MS", "1k", "is not used: it is a number of milliseconds"),
    ("NCCL_EP_LL_COMBINE", "Exact", "is not used: it is reduce or exact"),
    ("NCCL_EP_NODE_SUMS", "all", "is not used: it is home or invariant"),
    ("NCCL_EP_HT_CHUNK_BYTES", "4M", "is not used: it is a number of bytes"),
    ("NCCL_EP_TUNING_FILE", "/no/such", "there is no such file")])
def test_variables_that_are_wrong(monkeypatch, name, value, text):
    monkeypatch.setenv(name, value)
    [line] = [line for line in doctor.report() if line.startswith(f"!! {name}={value}")]
    assert line.endswith(text)


def test_a_library_that_is_not_there(monkeypatch):
    monkeypatch.setenv("NCCL_EP_LIBRARY", "/no/libnccl_ep.so")
    assert "!! no library: NCCL_EP_LIBRARY: there is no file /no/libnccl_ep.so" in doctor.report()


def test_another_library(monkeypatch):
    """Of its first generation, without what this one adds."""
    monkeypatch.setattr(NCCLLibrary, "has", lambda library, name: name != "ncclEpGetVersion")
    assert any(line.startswith("!!") and "another libnccl_ep" in line for line in doctor.report())


def test_a_torch_that_cannot_be_imported(tmp_path, alone):
    """A line, and the others all the same."""
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: no such file')\n")
    path = os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))
    ran = subprocess.run([sys.executable, "-m", "nccl_ep", "doctor"], capture_output=True, text=True,
                         env={**os.environ, "PYTHONPATH": path})
    lines = ran.stdout.splitlines()
    assert ran.returncode == 1 and not ran.stderr
    assert lines[1] == "!! PyTorch cannot be imported: OSError: libcudart.so.12: no such file"
    assert any(line.startswith("ok libnccl_ep ") for line in lines)


def test_it_knows_the_documented_variables():
    path = ROOT / "docs" / "env.md"
    if not path.exists():
        pytest.skip("no documents here")
    named = set(re.findall(r"^\| `(NCCL_EP_\w+)`", path.read_text(), re.M))
    assert named == {*doctor.VARIABLES, "NCCL_EP_CUDA", "NCCL_EP_ARCHS"}


def test_it_takes_for_known_what_the_library_does():
    """The other variables of READ_ELSEWHERE and READ_BY_NVIDIA in the library's sources."""
    path = ROOT / "src" / "env.rs"
    if not path.exists():
        pytest.skip("no sources here")
    [elsewhere] = re.findall(r"READ_ELSEWHERE: .*? = \[(.*?)\];", path.read_text(), re.S)
    assert {*doctor.BUILD_VARIABLES, "NCCL_EP_LIBRARY"} == set(re.findall(r'"(\w+)"', elsewhere))
    [nvidia] = re.findall(r"READ_BY_NVIDIA: .*? = \[(.*?)\];", (path.parent / "env" / "later.rs").read_text(), re.S)
    assert list(doctor.READ_BY_NVIDIA) == [f"NCCL_EP_{name}" for name in re.findall(r'"(\w+)"', nvidia)]


@pytest.mark.parametrize("name", ["NCCL_EP_HOME", "NCCL_EP_JIT_BUILD_INCLUDE_DIR", "NCCL_EP_SHUFFLE_SMS"])
def test_variables_of_nvidia_s_library(monkeypatch, name):
    monkeypatch.setenv(name, "4")
    assert f"-- {name}=4, which this library does not read" in doctor.report()


def test_as_a_program(fresh):
    ran = fresh("-m", "nccl_ep", "doctor")
    assert ran.returncode == 0, ran.stdout
    assert "libnccl_ep" in ran.stdout and not ran.stderr
