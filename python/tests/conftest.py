"""Tests run on every rank at once (mpirun python -m pytest); a test fails if it fails anywhere.

Rank 0 closes with the line `N passed, N failed`, which the test runner reads.
"""

import ctypes
import datetime
import gc
import importlib.util
import json
import os
import pathlib
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist

from nccl_ep import EpGroup, EpHandle
from nccl_ep.layers import EPAll2AllLayer
from nccl_ep.nccl_wrapper import NCCLLibrary
from nccl_ep.rendezvous import launched_local_rank, launched_rank
from nccl_ep.runtime import uses_stand_ins
from fresh import Fresh
from problems import Problem

_WAIT = datetime.timedelta(seconds=60)


def pytest_configure(config: pytest.Config) -> None:
    """Synchronises all ranks and loads the library, so that the device type is known."""
    config.addinivalue_line("markers", "high_throughput: needs a backend that has it")
    torch.set_num_threads(1)
    try:
        rank, size = launched_rank()
    except RuntimeError:
        rank, size = 0, 1
    job = os.environ.get("PMIX_NAMESPACE", str(os.getpid()))
    meeting = pathlib.Path(tempfile.gettempdir()) / f"nccl_ep-tests-{os.getuid()}-{job}"
    config.meeting = meeting
    NCCLLibrary()
    if not uses_stand_ins():
        torch.cuda.set_device(launched_local_rank() % torch.cuda.device_count())
    config.store = dist.FileStore(str(meeting), size)
    config.store.set_timeout(_WAIT)
    dist.init_process_group("gloo", store=config.store, rank=rank, world_size=size, timeout=_WAIT)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tells every rank how many tests failed on any."""
    store = session.config.store
    store.set(f"failed on {dist.get_rank()}", json.dumps(sorted(session.config.failed_tests)))
    failed = {name for rank in range(dist.get_world_size())
              for name in json.loads(store.get(f"failed on {rank}"))}
    session.config.failed_anywhere = failed
    if failed and session.exitstatus == 0:
        session.exitstatus = 1


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _config.failed_tests.add(report.nodeid)
    elif report.passed and report.when == "call":
        _config.passed_tests.add(report.nodeid)


def pytest_collection_finish(session: pytest.Session) -> None:
    global _config
    _config = session.config
    _config.failed_tests = set()
    _config.passed_tests = set()
    # What PyTorch brings stays. Tests that collect garbage would look at all of it each time.
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    rank = dist.get_rank()
    # Rank 0 removes the store's file next, which others may still read, and closes their output.
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        config.meeting.unlink(missing_ok=True)
        failed = getattr(config, "failed_anywhere", {"collection"})
        passed = getattr(config, "passed_tests", set()) - failed
        print(f"\n{len(passed)} passed, {len(failed)} failed", flush=True)


@pytest.fixture(scope="session")
def world() -> tuple[int, int]:
    """Rank and number of ranks."""
    return dist.get_rank(), dist.get_world_size()


@pytest.fixture(scope="session")
def rank(world: tuple[int, int]) -> int:
    return world[0]


@pytest.fixture(scope="session")
def size(world: tuple[int, int]) -> int:
    return world[1]


@pytest.fixture(params=["ll", pytest.param("ht", marks=pytest.mark.high_throughput)])
def algorithm(request) -> str:
    """For a test of both modes."""
    return request.param


@pytest.fixture(scope="session")
def alone(world: tuple[int, int]) -> None:
    """For a test to which other ranks mean nothing, and which takes seconds: PyTorch starts once more, or
    loads half of itself."""
    if world[1] != 1:
        pytest.skip("the run with one rank does this")


@pytest.fixture(scope="session")
def fresh(alone):
    """Runs Pythons that have loaded PyTorch and nothing else."""
    with Fresh() as pythons:
        yield pythons.run


@pytest.fixture(scope="session")
def two_ranks(world: tuple[int, int]) -> None:
    """For a test that loads the compiler, which takes seconds on each rank."""
    if world[1] != 2:
        pytest.skip("the run with two ranks does this")


@pytest.fixture(scope="session")
def nodes(world, pytestconfig) -> list[str]:
    """The node of each rank: its NCCL_HOSTID, or nothing."""
    rank, size = world
    store = pytestconfig.store
    store.set(f"node of {rank}", os.environ.get("NCCL_HOSTID", ""))
    return [store.get(f"node of {each}").decode() for each in range(size)]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of tensors."""
    return torch.device("cpu" if uses_stand_ins() else f"cuda:{torch.cuda.current_device()}")


@pytest.fixture
def poisoned(monkeypatch) -> None:
    """New memory holds NaN, or -1, until somebody writes to it."""
    def filled(made: torch.Tensor) -> torch.Tensor:
        if made.dim() and made.device.type != "meta":
            made.view(torch.uint8).fill_(0xff)
        return made

    for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
        make = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *size, make=make, **named: filled(make(*size, **named)))


@pytest.fixture(scope="session")
def on_gpu(device) -> None:
    """For a test of streams or CUDA graphs."""
    if device.type == "cpu":
        pytest.skip("the CPU has no streams and no graphs")


@pytest.fixture
def captures(on_gpu, nodes) -> None:
    """For a test whose CUDA graphs route, for which the host waits over several nodes."""
    if len(set(nodes)) > 1:
        pytest.skip("no graphs route over several nodes")


@pytest.fixture(scope="session")
def library() -> NCCLLibrary:
    """The library, loaded once."""
    return NCCLLibrary()


@pytest.fixture(scope="module")
def deep_ep():
    """The package of this name, as a program finds it. Closes what Buffers leave that are never destroyed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(pathlib.Path(__file__).parents[1] / "deep-ep"))
        assert importlib.util.find_spec("deep_ep") is not None
        yield importlib.import_module("deep_ep")
        _close_buffers()
    for name in [each for each in sys.modules if each.partition(".")[0] == "deep_ep"]:
        del sys.modules[name]


@pytest.fixture
def closed_buffers(deep_ep):
    """The same behind each test, for those that make process groups: threads of many idle ones take all the time."""
    yield
    _close_buffers()


def _close_buffers() -> None:
    from nccl_ep.deep_ep import shared

    for each in shared._SHARED.values():
        each.close()
    shared._SHARED.clear()


@pytest.fixture(scope="session")
def cudart(library: NCCLLibrary) -> ctypes.CDLL:
    """The CUDA runtime; on GPUs the one that PyTorch has loaded for the whole process."""
    return library.base if uses_stand_ins() else ctypes.CDLL(None)


@pytest.fixture(scope="session")
def comm(library: NCCLLibrary):
    """One communicator for all tests: creating one takes a second."""
    from nccl_ep import get_nccl_comm_from_group

    comm = get_nccl_comm_from_group(None, library)
    yield comm
    library.ncclCommDestroy(comm)


@pytest.fixture
def group(comm):
    """Makes groups; those still open are closed after the test."""
    made: list[EpGroup] = []

    def make(**settings) -> EpGroup:
        made.append(EpGroup(comm=comm, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def problem(world, device) -> Problem:
    """Some ids are -1, rank 1 has no tokens, the others unequally many."""
    return Problem(*world, hidden=256, dtype=torch.bfloat16, masked=True, device=device)


@pytest.fixture
def opened(group, world, device):
    """Makes a problem, a group with a bound in low latency and none in high throughput, and a handle."""
    def make(algorithm: str, *, bound: int | None = None, **settings) -> tuple[Problem, EpGroup, EpHandle]:
        problem = Problem(*world, device=device, **settings)
        most = (0 if algorithm == "ht" else 9 + 2 * world[1]) if bound is None else bound
        ep = group(num_experts=problem.num_experts, hidden=problem.hidden, algorithm=algorithm,
                   max_tokens_per_rank=most, dtype=problem.dtype)
        return problem, ep, ep.create_handle(problem.topk_idx)

    return make


@pytest.fixture
def low_latency(opened) -> tuple[Problem, EpHandle]:
    """A problem and a handle, for programs that are traced."""
    return opened("ll", bound=32, hidden=128, dtype=torch.bfloat16)[::2]


@pytest.fixture
def small(group, world, device):
    """Makes a group with an expert on each rank, and a handle that sends so many tokens to the first."""
    def make(tokens: int, algorithm: str = "ll", **settings) -> tuple[EpGroup, EpHandle]:
        most = {} if algorithm == "ht" else {"max_tokens_per_rank": tokens}
        ep = group(**{"num_experts": world[1], "hidden": 8, "algorithm": algorithm, "dtype": torch.float32, **most,
                      **settings})
        return ep, ep.create_handle(torch.zeros((tokens, 1), dtype=torch.int64, device=device))

    return make


@pytest.fixture
def layer(world, nodes, comm, monkeypatch):
    """Makes layers, over the communicator of all tests; those still open are finalized after the test."""
    made = []
    monkeypatch.setitem(EPAll2AllLayer.__init__.__globals__, "EpGroup",
                        lambda *arguments, **settings: EpGroup(*arguments, **settings | {"comm": comm}))

    def make(problem: Problem, **settings) -> EPAll2AllLayer:
        rank, size = world
        made.append(EPAll2AllLayer(
            None, settings.pop("max_tokens", 4), problem.hidden, problem.top_k, rank,
            problem.num_experts, nodes.count(nodes[rank]), size, dtype=problem.dtype,
            **{"num_sm": 8, **settings}))
        return made[-1]

    yield make
    for each in made:
        each.finalize()


@pytest.fixture
def layered(layer, world, device):
    """Makes a problem, and a layer for it."""
    def make(latency_tokens: int = 0, **settings) -> tuple[Problem, EPAll2AllLayer]:
        problem = Problem(*world, device=device, **settings)
        return problem, layer(problem, latency_tokens=latency_tokens)

    return make
