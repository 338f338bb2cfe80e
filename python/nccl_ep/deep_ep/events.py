"""`EventHandle` and `EventOverlap`, and how operations run beside the current stream.

On the CPU every operation has finished when its call returns, so events do nothing there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch

from nccl_ep.runtime import current_stream, new_event, on_stream, uses_stand_ins


class EventHandle:
    """An event at this point of the current stream, or of another one."""

    def __init__(self, stream: Any = None) -> None:
        self._event = None if uses_stand_ins() else new_event()
        if self._event is not None:
            self._event.record(current_stream() if stream is None else stream)

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event."""
        if self._event is not None:
            current_stream().wait_event(self._event)


class EventOverlap:
    """An event, or None where there is nothing to wait for, and tensors to keep until then."""

    def __init__(self, event: EventHandle | None = None,
                 extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event."""
        if self.event is None:
            raise ValueError("event: there is none; the operation was not asynchronous")
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


class CommStream:
    """Where a `Buffer`'s operations run: asynchronous ones on a stream of its own, others on the current one, which
    would wait for them anyway. The library keeps the order of all."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = None if device.type == "cpu" else torch.cuda.Stream(device)

    @contextlib.contextmanager
    def on(self, previous: Any, inputs: Iterable[Any], asynchronous: bool) -> Iterator[None]:
        """Runs what is inside behind `previous`, an event, or the current stream."""
        event = getattr(previous, "event", previous)
        if self.stream is None or not asynchronous:
            if event is not None:
                event.current_stream_wait()
            yield
            return
        if event is None:
            self.stream.wait_stream(current_stream())
        with on_stream(self.stream):
            if event is not None:
                event.current_stream_wait()
            _keep(inputs, self.stream)
            yield

    def finish(self, asynchronous: bool, outputs: Iterable[Any]) -> EventOverlap:
        """What an operation returns: its event, or none if it is on the current stream."""
        if not asynchronous:
            return EventOverlap()
        if self.stream is not None:
            _keep(outputs, current_stream())
        return EventOverlap(EventHandle(self.stream))


def _keep(tensors: Iterable[Any], stream: Any) -> None:
    """Keeps the memory of those that are tensors until `stream` has come here."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            tensor.record_stream(stream)
