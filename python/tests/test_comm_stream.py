"""The order of a Buffer's operations on two streams, by streams and events that only say who waits for whom."""

import contextlib
import types

import torch

from nccl_ep import runtime
from nccl_ep.deep_ep import events


class Stream:
    """A stream of GPU 1, while the current GPU may be another."""

    cuda_stream, device_index = 0, 1
    is_captured = False

    def __init__(self):
        self.waits = []

    def wait_stream(self, other):
        assert self.is_captured <= other.is_captured, "a graph waits for what is not in it"
        self.is_captured |= other.is_captured
        self.waits.append(other)

    def wait_event(self, event):
        assert self.is_captured <= event.is_captured, "a graph waits for what is not in it"
        self.is_captured |= event.is_captured
        self.waits.append(event.stream)


class Event:
    def record(self, stream):
        self.stream, self.is_captured = stream, stream.is_captured

    def current_stream_wait(self):
        runtime.current_stream(1).wait_event(self)


def comm_stream(monkeypatch):
    """One between a stream that is current and one of its own."""
    now = [Stream()]

    class On:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            now.append(self.stream)

        def __exit__(self, *_):
            now.pop()

    def current(device=None):
        assert device == 1
        return now[-1]

    for module in (runtime, events):
        monkeypatch.setattr(module, "current_stream", current)
        monkeypatch.setattr(module, "on_stream", On)
        monkeypatch.setattr(module, "new_event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[-1].is_captured)
    return now[0], events.CommStream(torch.device("cuda", 1), runtime.Use(torch.device("cuda", 1)))


def ran(comm, previous=None, asynchronous=False):
    """The streams that it waited for, and whether it was beside the current one."""
    with comm.on(previous, [], asynchronous) as beside:
        return runtime.current_stream(1).waits, beside


def test_operations_follow_each_other(monkeypatch):
    """Whatever stream they are on; also in a graph, in which nothing of an earlier graph is waited for."""
    current, comm = comm_stream(monkeypatch)
    for captured in (False, True, True):
        current.waits, comm.stream.waits = [], []
        current.is_captured, comm.stream.is_captured = captured, False
        early = Event()
        early.record(current)
        assert ran(comm) == ([], False)
        assert ran(comm, early, asynchronous=True) == ([current, current], True)
        assert ran(comm) == ([comm.stream], False)
        assert ran(comm) == ([comm.stream], False)
        assert ran(comm, asynchronous=True) == ([current] * 4, True)


def test_memory_is_kept(monkeypatch):
    """For the stream that is current on the tensor's GPU."""
    current, _ = comm_stream(monkeypatch)
    noted = []
    tensor = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1), record_stream=noted.append)
    assert runtime.kept(tensor) is tensor and noted == [current]


def test_those_of_other_buffers_follow_too(monkeypatch):
    """And they follow one that has failed, of which a part may be enqueued."""
    _, comm = comm_stream(monkeypatch)
    with contextlib.suppress(KeyError), comm.on(None, [], True):
        raise KeyError
    other = events.CommStream(torch.device("cuda", 1), comm.order)
    assert ran(other) == ([comm.stream], False)
