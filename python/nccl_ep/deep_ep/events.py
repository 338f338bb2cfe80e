"""`EventHandle` and `EventOverlap`, and how operations run beside the current stream.

On the CPU every operation has finished when its call returns, so events do nothing there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch

from nccl_ep.runtime import Use, current_stream, new_event, on_stream, uses_stand_ins


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
    """Where a `Buffer`'s operations run: on a stream of its own, beside the current one, or on that.

    On the current stream if that would wait for the end and the beginning anyway. Tensors are of that stream then, so
    their memory is used again in a capture, too: torch keeps what other streams have used until a capture ends.
    """

    def __init__(self, device: torch.device, order: Use) -> None:
        self.stream: Any = None if device.type == "cpu" else torch.cuda.Stream(device)
        self.order = order

    @contextlib.contextmanager
    def on(self, previous: Any, inputs: Iterable[Any], asynchronous: bool, local: bool = False) -> Iterator[bool]:
        """Runs what is inside behind `previous`, an event, or the current stream; whether beside the current stream.
        What is `local` waits for no other rank."""
        event = getattr(previous, "event", previous)
        beside = self.stream is not None and (asynchronous or event is not None)
        if beside and event is None:
            self.stream.wait_stream(current_stream(self.stream.device_index))
        with on_stream(self.stream) if beside else contextlib.nullcontext():
            if beside:
                if event is not None:
                    event.current_stream_wait()
                _keep(inputs, self.stream)
            with contextlib.nullcontext() if local else self.order:
                yield beside

    def finish(self, beside: bool, asynchronous: bool, outputs: Iterable[Any]) -> EventOverlap:
        """What an operation returns: its event, or none if the current stream waits for it."""
        if beside:
            current = current_stream(self.stream.device_index)
            _keep(outputs, current)
            if not asynchronous:
                current.wait_stream(self.stream)
        return EventOverlap(EventHandle(self.stream) if asynchronous else None)


def _keep(tensors: Iterable[Any], stream: Any) -> None:
    """Keeps the memory of those that are tensors until `stream` has come here."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            tensor.record_stream(stream)
