"""What every example needs first: torch.distributed over the ranks, and the device of this one.

Started by mpirun, srun or torchrun; on GPUs the i-th rank of a machine takes GPU i, with the CPU
stand-ins the CPU.
"""

import os
import tempfile

import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep.rendezvous import launched_local_rank, launched_rank
from nccl_ep.runtime import uses_stand_ins


def start() -> tuple[int, int, torch.device]:
    """Rank, number of ranks, device."""
    rank, size = launched_rank()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    nccl_ep.NCCLLibrary()
    cpu = uses_stand_ins()
    if not cpu:
        torch.cuda.set_device(launched_local_rank() % torch.cuda.device_count())
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo", rank=rank, world_size=size)
    else:
        # mpirun sets no address, so on several machines the caller must (-x MASTER_ADDR=... -x
        # MASTER_PORT=...). Ranks of one machine share its folder for temporary files. The store
        # also needs its file for new groups of ranks, and removes it when the last rank is done.
        job = os.environ.get("PMIX_NAMESPACE", os.getppid())
        meeting = os.path.join(tempfile.gettempdir(), f"nccl_ep-example-{os.getuid()}-{job}")
        dist.init_process_group("gloo", store=dist.FileStore(meeting, size), rank=rank,
                                world_size=size)
    device = torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())
    return rank, size, device


def finish(rank: int, text: str) -> None:
    """Prints on rank 0, once every rank is here, what was checked."""
    dist.barrier()
    if rank == 0:
        print(f"PASSED: {text}", flush=True)
    dist.destroy_process_group()
