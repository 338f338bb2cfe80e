"""Creates a communicator over the ranks of torch.distributed, or of a launcher.

Without torch.distributed the ranks meet at an abstract Unix socket, which leaves no file behind.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

from nccl_ep.types import ncclComm_t, ncclUniqueId

if TYPE_CHECKING:
    from nccl_ep.nccl_wrapper import NCCLLibrary

_DEADLINE_SECONDS = 30.0
_TORCHRUN = ("RANK", "WORLD_SIZE")
_LAUNCHERS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
              ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
              ("SLURM_PROCID", "SLURM_NTASKS"),
              _TORCHRUN)
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID",
                "LOCAL_RANK")
# Each of these distinguishes jobs on one machine.
_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "MPIRUN_ID", "TORCHELASTIC_RUN_ID")

_meetings = 0


def get_nccl_comm_from_group(group: Any, nccl_lib: NCCLLibrary) -> ncclComm_t:
    """A new NCCL communicator over the ranks of `group`; collective.

    `group` is a torch.distributed group, or None for all processes. If torch.distributed is not in
    use, the processes are those that mpirun, srun or torchrun started, all on this machine. The
    caller destroys the communicator.
    """
    distributed = _initialised_distributed()
    if distributed is not None:
        from nccl_ep.arguments import require_group

        require_group("group", group)
        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
        if rank < 0:
            raise ValueError("group: this process is none of its ranks")
        shared = broadcast(_new_id(nccl_lib) if rank == 0 else b"",
                           ctypes.sizeof(ncclUniqueId), group, distributed)
    elif group is not None:
        raise TypeError("group: torch.distributed is not initialised, so it must be None, for all "
                        f"processes of the launcher, not {type(group).__name__}")
    else:
        rank, size = launched_rank()
        shared = _share(_new_id(nccl_lib) if rank == 0 else None, rank, size)
    return nccl_lib.ncclCommInitRank(size, ncclUniqueId.from_buffer_copy(shared), rank)


def launched_rank() -> tuple[int, int]:
    """Rank and number of the processes that a launcher started."""
    # torchrun's workers inherit what srun or mpirun set for torchrun itself.
    launchers = (_TORCHRUN, *_LAUNCHERS) if _by_torchrun() else _LAUNCHERS
    for rank, size in launchers:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    raise RuntimeError("which rank is this? Initialise torch.distributed, or start with mpirun, "
                       "srun or torchrun (" + ", ".join(name for name, _ in _LAUNCHERS) + ")")


def launched_local_rank() -> int:
    """This process's number among those that the launcher started on this machine; its rank if the
    launcher does not say."""
    for name in ("LOCAL_RANK",) if _by_torchrun() else _LOCAL_RANKS:
        if name in os.environ:
            return int(os.environ[name])
    return launched_rank()[0]


def _by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _initialised_distributed() -> Any:
    try:
        import torch.distributed as distributed
    except ImportError:
        return None
    ready = distributed.is_available() and distributed.is_initialized()
    return distributed if ready else None


def collective_device(distributed: Any, group: Any) -> str:
    """The device of tensors in collectives of a torch.distributed group."""
    import torch

    backend = distributed.get_backend(group)
    # If the program chose none, torch uses Gloo for the CPU and, where available, NCCL.
    if backend == "undefined":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if "nccl" in backend else "cpu"


def broadcast(mine: bytes, length: int, group: Any, distributed: Any) -> bytes:
    """Rank 0's `length` bytes on every rank of a torch.distributed group, padded with zeros."""
    import torch

    # torch's own broadcast of objects needs NumPy.
    data = bytearray(mine[:length].ljust(length, b"\0"))
    tensor = torch.frombuffer(data, dtype=torch.uint8).to(collective_device(distributed, group))
    source = distributed.get_global_rank(group, 0) if group is not None else 0
    distributed.broadcast(tensor, src=source, group=group)
    return bytes(tensor.tolist())


def _new_id(nccl_lib: NCCLLibrary) -> bytes:
    return bytes(nccl_lib.ncclGetUniqueId())


def _on_one_machine(size: int) -> bool:
    """Whether the launcher says nothing else."""
    if _by_torchrun():
        return os.environ.get("LOCAL_WORLD_SIZE", str(size)) == str(size)
    # Within a job of Slurm on several machines, mpirun may still start all ranks on one.
    here = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if here is not None:
        return here == str(size)
    return os.environ.get("SLURM_STEP_NUM_NODES", os.environ.get("SLURM_NNODES", "1")) == "1"


def _share(mine: bytes | None, rank: int, size: int) -> bytes:
    """Rank 0's bytes on every rank."""
    global _meetings
    _meetings += 1
    if not _on_one_machine(size):
        raise RuntimeError("ranks on several machines: initialise torch.distributed first")
    address = f"\0nccl_ep.{os.getuid()}.{_job()}.{_meetings}"
    deadline = time.monotonic() + _DEADLINE_SECONDS
    if mine is not None:
        _serve(address, mine, size - 1, deadline)
        return mine
    return _fetch(address, rank, deadline)


def _job() -> str:
    """A name that the ranks of this job share, and no other job on this machine has."""
    for name in _JOB_NAMES:
        if os.environ.get(name, "none") != "none":
            return os.environ[name]
    # Without --rdzv-id torchrun calls every job "none", but no two jobs have the same port.
    if _by_torchrun() and "MASTER_PORT" in os.environ:
        return f"port.{os.environ['MASTER_PORT']}"
    if "SLURM_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_STEP_ID', '')}"
    # The launcher is the parent of all ranks.
    return str(os.getppid())


def _serve(address: str, data: bytes, readers: int, deadline: float) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        try:
            server.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise RuntimeError(f"the ranks of another job meet at {address[1:]!r}; initialise "
                               "torch.distributed, or start the jobs as different ones") from None
        server.listen(readers + 1)
        served = 0
        while served < readers:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                peer, _ = server.accept()
            except TimeoutError:
                raise RuntimeError(f"rank 0 waited {_DEADLINE_SECONDS:.0f} s for the others; "
                                   f"{served} of {readers} came") from None
            with peer:
                if _is_own(peer):
                    peer.sendall(data)
                    served += 1


def _fetch(address: str, rank: int, deadline: float) -> bytes:
    length = ctypes.sizeof(ncclUniqueId)
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                client.connect(address)
                data = client.recv(length, socket.MSG_WAITALL) if _is_own(client) else b""
            except (ConnectionRefusedError, ConnectionResetError, BlockingIOError, TimeoutError):
                data = b""
            if len(data) == length:
                return data
        time.sleep(0.01)
    raise RuntimeError(f"rank {rank} waited {_DEADLINE_SECONDS:.0f} s for rank 0 on this machine")


def _is_own(peer: socket.socket) -> bool:
    """Whether the peer runs as the same user: abstract sockets have no owner."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())
