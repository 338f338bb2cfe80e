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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nccl_ep.types import ncclComm_t, ncclUniqueId

if TYPE_CHECKING:
    from nccl_ep.nccl_wrapper import NCCLLibrary

_TIMEOUT = "NCCL_EP_TIMEOUT_MS"
_DEFAULT_TIMEOUT_MS = 100_000  # the library's
_TORCHRUN = ("RANK", "WORLD_SIZE")
# Slurm's come after those that may be set for each process within one task of Slurm.
_LAUNCHERS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
              ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
              ("PMI_RANK", "PMI_SIZE"),
              ("SLURM_PROCID", "SLURM_NTASKS"),
              _TORCHRUN)
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                "SLURM_LOCALID", "LOCAL_RANK")
# Each of these distinguishes jobs on one machine.
_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "MPIRUN_ID", "TORCHELASTIC_RUN_ID")
# What an inner launcher removes, so that nobody takes its ranks for those of an outer one.
LAUNCHERS_VARIABLES = (*(name for pair in _LAUNCHERS for name in pair), *_LOCAL_RANKS, *_JOB_NAMES,
                       "OMPI_COMM_WORLD_LOCAL_SIZE")

_meetings = 0


def get_nccl_comm_from_group(group: Any, nccl_lib: NCCLLibrary) -> ncclComm_t:
    """A new NCCL communicator over the ranks of `group`; collective.

    `group` is a torch.distributed group, or None for all processes. If torch.distributed is not in
    use, the processes are those that mpirun, srun or torchrun started, all on this machine, or this
    one alone. The caller destroys the communicator.
    """
    return communicator("group", group, nccl_lib)


def communicator(name: str, group: Any, nccl_lib: NCCLLibrary,
                 run: Callable[..., ncclComm_t] | None = None) -> ncclComm_t:
    """The same, where the argument that has the group is called `name`, and `run` calls what waits for NCCL."""
    distributed = _initialised_distributed()
    if distributed is not None:
        from nccl_ep.arguments import require_group

        require_group(name, group)
        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
        if rank < 0:
            raise ValueError(f"{name}: this process is none of its ranks")
        shared = broadcast(_new_id(nccl_lib) if rank == 0 else b"",
                           ctypes.sizeof(ncclUniqueId), group, distributed)
    elif group is not None:
        raise TypeError(f"{name}: torch.distributed is not initialised, so it must be None, for "
                        f"all processes of the launcher, not {type(group).__name__}")
    else:
        rank, size = launched_rank()
        shared = _share(_new_id(nccl_lib) if rank == 0 else None, rank, size)
    arguments = size, ncclUniqueId.from_buffer_copy(shared), rank
    return run(nccl_lib.ncclCommInitRank, *arguments) if run else nccl_lib.ncclCommInitRank(*arguments)


def launched_rank() -> tuple[int, int]:
    """Rank and number of the processes that a launcher started; 0 and 1 without a launcher."""
    # torchrun's workers inherit what srun or mpirun set for torchrun itself.
    launchers = (_TORCHRUN, *_LAUNCHERS) if _by_torchrun() else _LAUNCHERS
    for rank, size in launchers:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    for rank, size in launchers:
        if rank in os.environ:
            raise RuntimeError(f"which of how many ranks is this? There is a {rank} in the "
                               f"environment, but no {size}; initialise torch.distributed, or "
                               "start with mpirun, srun or torchrun")
    return 0, 1


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
    if size == 1 and mine is not None:
        return mine
    _meetings += 1
    if not _on_one_machine(size):
        raise RuntimeError("ranks on several machines: initialise torch.distributed first")
    address = f"\0nccl_ep.{os.getuid()}.{_job()}.{_meetings}"
    timeout_ms = _timeout_ms()
    deadline = time.monotonic() + timeout_ms / 1000
    if mine is not None:
        came = _serve(address, mine, size - 1, deadline)
        if came == size - 1:
            return mine
        missing = f"the others, and {came} of {size - 1} came"
    else:
        if data := _fetch(address, deadline):
            return data
        missing = "rank 0 on this machine"
    raise RuntimeError(f"rank {rank} of {size} waited {timeout_ms} ms ({_TIMEOUT}) for {missing}")


def _timeout_ms() -> int:
    """How long ranks wait for each other: the library's setting, with its rules and default."""
    text = os.environ.get(_TIMEOUT, "").strip()
    given = int(text) if text.isascii() and text.isdigit() else 0
    return given if 0 < given < 2**64 else _DEFAULT_TIMEOUT_MS


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
    # The launcher is the parent of all ranks. Containers may share a network, and number their processes alike.
    try:
        return f"{os.getppid()}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return str(os.getppid())


def _serve(address: str, data: bytes, readers: int, deadline: float) -> int:
    """Gives the data to so many readers; returns how many came in time."""
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
            server.settimeout(_seconds_until(deadline))
            try:
                peer, _ = server.accept()
            except TimeoutError:
                break
            with peer:
                if _is_own(peer):
                    peer.sendall(data)
                    served += 1
        return served


def _seconds_until(deadline: float) -> float:
    """As a socket takes them: not 0, and not more than its clock can hold."""
    return min(max(deadline - time.monotonic(), 0.001), 1e6)


def _fetch(address: str, deadline: float) -> bytes:
    """Rank 0's data, or nothing if it does not come in time."""
    length = ctypes.sizeof(ncclUniqueId)
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_seconds_until(deadline))
            try:
                client.connect(address)
                data = client.recv(length, socket.MSG_WAITALL) if _is_own(client) else b""
            except (ConnectionRefusedError, ConnectionResetError, BlockingIOError, TimeoutError):
                data = b""
            if len(data) == length:
                return data
        time.sleep(0.01)
    return b""


def _is_own(peer: socket.socket) -> bool:
    """Whether the peer runs as the same user: abstract sockets have no owner."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())
