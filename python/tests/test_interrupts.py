"""Ctrl-C while a call waits for other ranks: the wait ends, the call goes on, and so does the group."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from nccl_ep import NCCLLibrary

HIDDEN = 8


def is_waiting() -> bool:
    """Whether the main thread waits for other ranks, so that what it called has begun."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and frame.f_code.co_name not in ("join", "settle", "_ask_rows"):
        frame = frame.f_back
    return frame is not None


@pytest.fixture(autouse=True)
def heard():
    """SIGINT as Ctrl-C brings it to a program in the foreground: one that runs in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def late(rank, size):
    """Calls on all ranks but 0 once that has been interrupted, which waits for them; seconds that it went on."""
    if size == 1:
        pytest.skip("a rank alone waits for nobody")

    def interrupted(call: Callable[[], object]) -> float:
        sent: list[float] = []

        def interrupt() -> None:
            while not is_waiting():
                time.sleep(0.01)
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            call()
        return time.monotonic() - sent[0]

    def make(call: Callable[[], object]) -> None:
        took = interrupted(call) if rank == 0 else 0.0
        dist.barrier()
        if rank > 0:
            call()
        assert took < 10  # less than any deadline

    return make


def test_operations(group, rank, size, device, late, algorithm):
    """On the CPU, where calls wait; on GPUs kernels do."""
    if device.type == "cuda":
        pytest.skip("no call waits")
    ep = group(num_experts=size, hidden=HIDDEN, algorithm=algorithm, max_tokens_per_rank=2, dtype=torch.float32)
    ids = torch.arange(2)[:, None]
    tokens = torch.full((2, HIDDEN), rank + 1.0)
    if algorithm == "ht":
        late(lambda: ep.create_handle(ids))
    handle = ep.create_handle(ids)
    rows = torch.empty((1, 2 * size, HIDDEN) if algorithm == "ll" else (2 * size, HIDDEN))
    sums, weights = torch.empty_like(tokens), torch.ones((2, 1)) if algorithm == "ll" else None
    late(lambda: handle.dispatch(tokens, out=rows))
    late(lambda: handle.combine(rows, weights, out=sums))
    handle.dispatch(tokens)
    assert torch.equal(sums, tokens)


def test_a_group(group, world, late, library, monkeypatch):
    """One that nobody gets, as its constructor was interrupted, is made all the same."""
    made, create = [], NCCLLibrary.ncclEpCreateGroup
    monkeypatch.setattr(NCCLLibrary, "ncclEpCreateGroup",
                        lambda *arguments: made.append(create(*arguments)) or made[-1])
    late(lambda: group(num_experts=world[1], hidden=HIDDEN, max_tokens_per_rank=1))
    if world[0] == 0:
        while not made:
            time.sleep(0.001)
        library.ncclEpGroupDestroy(made[0])


@pytest.mark.high_throughput
def test_the_number_of_rows(group, rank, size, device, late, monkeypatch):
    """Which a dispatch without a bound asks for. Handles are there before it is known, on GPUs of one node."""
    ep = group(num_experts=size, hidden=HIDDEN, algorithm="ht")
    ids = torch.arange(2, device=device)[:, None]
    made = []

    def ask() -> int:
        if not made:
            made.append(ep.create_handle(ids))
        return made[0].num_recv_tokens

    if device.type == "cpu" or "NCCL_HOSTID" in os.environ:
        made.append(ep.create_handle(ids))
        if rank == 0:
            known = time.monotonic() + 0.5
            wait = NCCLLibrary.ncclEpHandleWaitNumRecvTokens
            monkeypatch.setattr(NCCLLibrary, "ncclEpHandleWaitNumRecvTokens", lambda library, handle, timeout: (
                wait(library, handle, timeout) if time.monotonic() > known else time.sleep(timeout / 1000)))
    late(ask)
    assert ask() == (size if rank < 2 else 0)
