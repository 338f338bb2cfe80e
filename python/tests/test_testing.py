"""`nccl_ep.testing.run`: ranks that it starts, what comes back from them, and how they end."""

import importlib
import os
import subprocess
import sys
import time
import types

import pytest

from documents import ROOT, snippets
from nccl_ep import InvalidUsageError, testing
from nccl_ep.rendezvous import _job, launched_local_rank, launched_rank

pytestmark = pytest.mark.usefixtures("alone")
_DOCUMENT = ROOT / "docs" / "python.md"


def need(ranks: int) -> None:
    if 0 < testing.number_of_gpus() < ranks:
        pytest.skip(f"there are fewer than {ranks} GPUs")


class Peculiar(Exception):
    """What pickle cannot make again."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def place(rank: int, ranks: int, word: str) -> list[object]:
    return [word, rank, ranks, launched_rank(), launched_local_rank(), _job(),
            os.environ["MASTER_PORT"]]


def refuse_on_the_last(rank: int, ranks: int) -> None:
    if rank < ranks - 1:
        time.sleep(600)
    raise InvalidUsageError(5, "invalid usage", "here: why")


def peculiar(rank: int, ranks: int) -> None:
    raise Peculiar(rank, ranks)


def late(rank: int, ranks: int) -> None:
    raise TimeoutError("no store")


def skip(rank: int, ranks: int) -> None:
    pytest.skip("not here")


def sleep(rank: int, ranks: int) -> None:
    time.sleep(600)


def say_and_sleep(rank: int, ranks: int) -> None:
    print("here", flush=True)
    sleep(rank, ranks)


def leave(rank: int, ranks: int) -> None:
    os._exit(3)


def abort(rank: int, ranks: int) -> None:
    os.abort()


def test_the_documented_program(tmp_path, monkeypatch):
    """As a module of its own, which the ranks import."""
    need(2)
    [code] = [code for code in snippets(_DOCUMENT) if "testing.run(" in code]
    (tmp_path / "test_moe.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("test_moe").test_exchange()


def test_ranks_within_another_job(monkeypatch):
    """No launcher above them counts."""
    need(2)
    for name in ("SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_NTASKS", "PMI_SIZE",
                 "OMPI_COMM_WORLD_SIZE", "SLURM_LOCALID", "PMIX_NAMESPACE"):
        monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    found = testing.run(2, place, "a word")
    assert os.environ == before
    assert [each[:5] for each in found] == [["a word", rank, 2, (rank, 2), rank] for rank in (0, 1)]
    assert found[0][5:] == found[1][5:] and found[0][5].startswith("nccl_ep.testing.")


@pytest.mark.parametrize("ranks, function, kind, text", [
    (2, refuse_on_the_last, InvalidUsageError, "here: why .NCCL error 5, invalid usage"),
    (1, peculiar, RuntimeError, "Peculiar: 0 and 1"),
    (1, late, TimeoutError, "^no store$"),
    # pickle does not find pytest's outcomes by their names.
    (1, skip, RuntimeError, "Skipped: not here")])
def test_an_exception_in_a_rank(ranks, function, kind, text):
    """It is raised here, and ends the others."""
    need(ranks)
    with pytest.raises(kind, match=text) as raised:
        testing.run(ranks, function)
    cause = raised.value.__cause__
    assert isinstance(cause, testing.InRank) and cause.rank == ranks - 1
    assert str(cause).startswith(f"in rank {ranks - 1} of {ranks}:")
    assert f", in {function.__name__}" in str(cause)


@pytest.mark.parametrize("function, kind, text", [
    (leave, RuntimeError, "rank 0 of 1 ended by exit status 3, without a result"),
    (abort, RuntimeError, "rank 0 of 1 ended by signal 6, without a result"),
    (sleep, TimeoutError, r"no result of ranks \[0\] of 1 after 0.5 s")])
def test_a_rank_without_a_result(function, kind, text):
    with pytest.raises(kind, match=text):
        testing.run(1, function, timeout=0.5 if function is sleep else 60)


def test_the_caller_is_killed():
    """Ranks do not stay behind: their output ends."""
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    program = "import test_testing; test_testing.testing.run(1, test_testing.say_and_sleep)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": path}) as caller:
        assert caller.stdout.readline() == "here\n"
        caller.kill()
        assert caller.communicate(timeout=60) == ("", None)


def test_a_function_of_a_terminal(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    function = types.FunctionType(sleep.__code__, {"__name__": "__main__"})
    with pytest.raises(ValueError, match="fn: must be in a module that other processes can import"):
        testing.run(1, function)
    sys.modules["__main__"].__file__ = "<stdin>"
    with pytest.raises(ValueError, match="not in a terminal, a notebook or standard input"):
        testing.run(1, sleep)
    with pytest.raises(ValueError, match="ranks: must be 1 or more, not 0"):
        testing.run(0, sleep)


def test_where_ranks_run(monkeypatch, tmp_path):
    """Each on a GPU of its own, if there are any; else on stand-ins, which must be there."""
    monkeypatch.setattr(testing, "number_of_gpus", lambda: 2)
    assert testing._device_settings(2, stand_ins=False) == {}
    with pytest.raises(ValueError, match="ranks: 3 are more than the 2 GPUs here; with stand_ins=T"):
        testing.run(3, sleep)
    (tmp_path / "libnccl_ep.so").touch()
    monkeypatch.setenv("NCCL_EP_LIBRARY", str(tmp_path / "libnccl_ep.so"))
    monkeypatch.delenv("NCCL_EP_NCCL_LIBRARY", raising=False)
    monkeypatch.setattr(testing, "STAND_INS", "libnobody.so")
    with pytest.raises(RuntimeError, match=f"libnobody.so, are neither in {tmp_path} nor in .*/rel"):
        testing.run(3, sleep, stand_ins=True)
    stand_ins = tmp_path / "libnobody.so"
    stand_ins.touch()
    assert testing._device_settings(3, stand_ins=True) == {
        "NCCL_EP_NCCL_LIBRARY": str(stand_ins), "NCCLEP_HOSTSIM_WITH_GPU": "1"}
    monkeypatch.setattr(testing, "number_of_gpus", lambda: 0)
    assert testing._device_settings(3, stand_ins=False) == {"NCCL_EP_NCCL_LIBRARY": str(stand_ins)}
