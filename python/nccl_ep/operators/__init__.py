"""Operators of torch under the namespace `nccl_ep`, by which compilers know dispatch and combine."""

from nccl_ep.requirement import require_torch

require_torch("nccl_ep.operators")
