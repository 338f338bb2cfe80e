"""What the ranks of a communicator tell each other while they tune, by NCCL alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from nccl_ep.nccl_wrapper import NCCLLibrary
from nccl_ep.rendezvous import get_nccl_comm_from_group
from nccl_ep.runtime import Runtime
from nccl_ep.types import ncclComm_t, ncclDataTypeEnum, ncclRedOpTypeEnum

_MOST_BYTES_OF_TEXT = 256


class Ranks:
    """All ranks of `comm`, which is what `EpGroup` takes; creating and every method collective."""

    def __init__(self, comm: Any) -> None:
        self.library = NCCLLibrary()
        self.runtime = Runtime(self.library)
        self._owned = not isinstance(comm, ncclComm_t)
        with self.runtime.current():
            self.comm = get_nccl_comm_from_group(comm, self.library) if self._owned else comm
        self.rank = self.library.ncclCommUserRank(self.comm)
        self.size = self.library.ncclCommCount(self.comm)

    def slowest(self, times: torch.Tensor) -> torch.Tensor:
        """The largest of each number on any rank, float64; the same on all."""
        return self._gather(times.to(torch.float64)).amax(dim=0)

    def on_first(self, action: Callable[[], None], path: str | os.PathLike[str]) -> None:
        """Runs a file operation on rank 0; if it fails, every rank raises OSError."""
        text = b""
        if self.rank == 0:
            try:
                action()
            except OSError as error:
                text = (error.strerror or repr(error)).encode()[:_MOST_BYTES_OF_TEXT]
        padded = text.ljust(_MOST_BYTES_OF_TEXT, b"\0")
        shared = self._gather(torch.tensor(list(padded), dtype=torch.float64, device="cpu"))
        if problem := bytes(int(each) for each in shared[0].tolist()).rstrip(b"\0"):
            raise OSError(f"{os.fspath(path)}: cannot be written: "
                          + problem.decode(errors="replace"))

    def close(self) -> None:
        """Destroys the communicator if this object made it."""
        if self._owned:
            self.library.ncclCommDestroy(self.comm)

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Every rank's `mine`, float64: [R, ...], on the CPU. Sums are what the stand-ins have."""
        rows = torch.zeros((self.size, *mine.shape), dtype=torch.float64, device="cpu")
        rows[self.rank] = mine
        with self.runtime.current(), self.runtime.device_copy(rows) as address:
            self.library.ncclAllReduce(address, address, rows.numel(), ncclDataTypeEnum.ncclFloat64,
                                       ncclRedOpTypeEnum.ncclSum, self.comm,
                                       self.runtime.stream(None))
        return rows
