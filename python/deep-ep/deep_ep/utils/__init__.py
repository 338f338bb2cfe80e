"""`deep_ep.utils` by `nccl_ep.deep_ep.utils`."""

from nccl_ep.deep_ep.utils import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
