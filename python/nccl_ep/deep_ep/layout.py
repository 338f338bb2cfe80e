"""The layout of a dispatch: which rank each token goes to, and how many tokens ranks and experts get."""

from __future__ import annotations

import torch

from nccl_ep.routing import known_ids
from nccl_ep.triton_kernels import working

_NODE = 8  # ranks of a node, as DeepEP counts them
_Counted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def layout(topk_idx: torch.Tensor, num_experts: int,
           num_ranks: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """num_tokens_per_rank int32 [R], per_rdma_rank (None up to 8 ranks), per_expert int32 [E],
    is_token_in_rank bool [T, R] of ids [T, K]; local, and nobody waits."""
    per_rank, per_expert, goes = _counted(topk_idx.to(torch.int64).contiguous(), num_experts, num_ranks)
    nodes = None
    if num_ranks > _NODE:
        whole = torch.nn.functional.pad(goes, (0, -num_ranks % _NODE))
        nodes = whole.unflatten(1, (-1, _NODE)).any(dim=2).sum(dim=0, dtype=torch.int32)
    return per_rank, nodes, per_expert, goes


def _counted(ids: torch.Tensor, num_experts: int, num_ranks: int) -> _Counted:
    # In a captured graph no operation costs the host time, and a first launch would have to compile.
    kernels = None
    if ids.is_cuda and not torch.cuda.is_current_stream_capturing():
        kernels = working("nccl_ep.deep_ep.layout_kernel", ids.device)
    count = _counted_by_torch if kernels is None else kernels.counted
    found: _Counted = count(ids, num_experts, num_ranks)
    return found


def _counted_by_torch(ids: torch.Tensor, num_experts: int, num_ranks: int) -> _Counted:
    # Few operations: each costs the host more time than the GPU.
    named = torch.zeros((ids.shape[0], num_experts + 1), dtype=torch.int32, device=ids.device)
    named.scatter_add_(1, known_ids(ids, num_experts),
                       torch.ones((), dtype=torch.int32, device=ids.device).expand(ids.shape))
    named = named[:, :num_experts]
    goes = named.unflatten(1, (num_ranks, -1)).any(dim=2)
    return goes.sum(dim=0, dtype=torch.int32), named.sum(dim=0, dtype=torch.int32), goes
