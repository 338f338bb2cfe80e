"""Measures which launch shapes suit this machine, and writes them down for the library.

The library reads the file that NCCL_EP_TUNING_FILE names, when a group is created.
"""

from nccl_ep.tuning.search import MoeShape, tune

__all__ = ["MoeShape", "tune"]
