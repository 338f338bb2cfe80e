"""Measures the best variants and launch shapes on this machine and writes them to a file for the library.

The library reads the file that NCCL_EP_TUNING_FILE names, when a group is created.
"""

from nccl_ep.requirement import require_torch

require_torch("nccl_ep.tuning")

from nccl_ep.tuning.candidates import Rows
from nccl_ep.tuning.drawing import show
from nccl_ep.tuning.files import merge, write
from nccl_ep.tuning.in_place import retune
from nccl_ep.tuning.search import MoeShape, tune

__all__ = ["MoeShape", "Rows", "merge", "retune", "show", "tune", "write"]
