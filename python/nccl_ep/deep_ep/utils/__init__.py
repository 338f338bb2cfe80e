"""The events of `deep_ep.utils`."""

from nccl_ep.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
