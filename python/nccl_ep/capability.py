"""What this process's library and device can do, without a group."""

from __future__ import annotations

from typing import Any

from nccl_ep.nccl_wrapper import NCCLLibrary
from nccl_ep.runtime import uses_stand_ins

_BULK_COPIES = (9, 0)  # compute capability


def capabilities() -> dict[str, Any]:
    """backend, "cuda" or "cpu" (the CPU stand-ins), or None without a GPU; library and version; nccl, the version;
    peer_memory: whether groups have memory that peers map; on GPUs also gpu, compute_capability and bulk_copies, by
    which kernels move rows where the GPU has them."""
    import torch

    library = NCCLLibrary()
    on_cpu = uses_stand_ins()
    found: dict[str, Any] = {
        "backend": "cpu" if on_cpu else "cuda" if torch.cuda.is_available() else None,
        "library": library.path, "version": library.ncclEpGetVersion(), "nccl": library.ncclGetVersion(),
        "peer_memory": library.has("ncclEpMemAlloc")}
    if found["backend"] == "cuda":
        capability = torch.cuda.get_device_capability()
        found.update(gpu=torch.cuda.get_device_name(), compute_capability=capability,
                     bulk_copies=capability >= _BULK_COPIES)
    return found
