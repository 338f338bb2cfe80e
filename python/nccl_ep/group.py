"""`EpGroup`: the ranks that exchange tokens, for torch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch

from nccl_ep.arguments import LARGEST, integer, require_dtype, require_group
from nccl_ep.errors import NcclEpError
from nccl_ep.nccl_wrapper import NCCLLibrary
from nccl_ep.rendezvous import get_nccl_comm_from_group
from nccl_ep.runtime import Runtime
from nccl_ep.types import NCCL_EP_AUTO, ncclComm_t, ncclEpAlgorithm_t, ncclEpGroupConfig_t

if TYPE_CHECKING:
    from nccl_ep.handle import EpHandle

_ALGORITHMS = {"ll": ncclEpAlgorithm_t.LOW_LATENCY, "ht": ncclEpAlgorithm_t.HIGH_THROUGHPUT}
Algorithm = Literal["ll", "ht"]
ROW_TYPES = (torch.bfloat16, torch.float16, torch.float32)


class EpGroup:
    """A group of ranks; creating and closing it are collective.

    num_experts          E, over all ranks; expert g lives on rank g // L, where L = E // R
    hidden               H, the largest row of a token, in elements of `dtype`: bfloat16, float16 or
                         float32
    algorithm            "ll" (low latency) or "ht" (high throughput)
    max_tokens_per_rank  M; 0 in HT: each handle finds its own bound
    comm                 the ranks: a torch.distributed group, None for all processes, or an
                         ncclComm_t, which then outlives the group
    num_channels         bound of a kernel, 2 SMs for each channel; 0: the library chooses

    Tensors are on the GPU that is current now, or on the CPU if the process has the CPU stand-ins.
    """

    def __init__(self, num_experts: int, hidden: int, *, algorithm: Algorithm = "ll",
                 max_tokens_per_rank: int = NCCL_EP_AUTO, dtype: torch.dtype = torch.bfloat16,
                 comm: Any = None, num_channels: int = NCCL_EP_AUTO) -> None:
        self._group: Any = None
        if algorithm not in ("ll", "ht"):
            raise ValueError(f"algorithm: must be 'll' or 'ht', not {algorithm!r}")
        require_dtype("dtype", dtype, ROW_TYPES)
        num_experts = integer("num_experts", num_experts)
        hidden = integer("hidden", hidden, most=LARGEST // dtype.itemsize)
        max_tokens_per_rank = integer("max_tokens_per_rank", max_tokens_per_rank)
        num_channels = integer("num_channels", num_channels)
        if not isinstance(comm, ncclComm_t):
            require_group("comm", comm)
        self._owned_comm: Any = None
        self._kept: set[EpHandle] = set()
        self.library = NCCLLibrary()
        self.runtime = Runtime(self.library)
        self.algorithm, self.num_experts, self.hidden = algorithm, num_experts, hidden
        self.max_tokens_per_rank, self.dtype = max_tokens_per_rank, dtype
        config = ncclEpGroupConfig_t(
            version=1, algorithm=_ALGORITHMS[algorithm], num_experts=num_experts,
            max_tokens_per_rank=max_tokens_per_rank, token_size_bytes=hidden * dtype.itemsize,
            num_channels=num_channels)
        with self.runtime.current():
            if not isinstance(comm, ncclComm_t):
                comm = self._owned_comm = get_nccl_comm_from_group(comm, self.library)
            self.comm = comm
            try:
                self.world_size = self.library.ncclCommCount(comm)
                self.rank = self.library.ncclCommUserRank(comm)
                self._group = self.library.ncclEpCreateGroup(comm, config, self._stream())
            except Exception:
                self._destroy_comm()
                raise
        self.num_local_experts = num_experts // self.world_size

    @property
    def device(self) -> torch.device:
        """The device of this group's tensors."""
        return self.runtime.device

    @property
    def handle(self) -> Any:
        """The ncclEpGroup_t, for calls to `library`."""
        if self._group is None:
            raise RuntimeError("the group is closed")
        return self._group

    def create_handle(self, topk_idx: torch.Tensor, *, counts: torch.Tensor | None = None,
                      stream: Any = None) -> EpHandle:
        """A handle for the routing `topk_idx`, int64 or int32 [T, K]; T may differ between ranks.

        Ids outside 0..E-1 take no part. Collective in HT, where `counts` int32 [L] gets the number
        of tokens that come here for each local expert, on the stream.
        """
        from nccl_ep.handle import EpHandle

        return EpHandle(self, topk_idx, counts=counts, stream=stream)

    def keep(self, handle: EpHandle) -> None:
        """Keeps a handle, as one that a CUDA graph has captured, until the group is closed."""
        self._kept.add(handle)

    def check(self) -> None:
        """Raises `NcclEpError` if an operation of the group has failed while running."""
        code = self.library.ncclEpGetAsyncError(self.handle)
        if code != 0:
            raise NcclEpError(code, self.library.ncclGetErrorString(code),
                              self.library.ncclEpGetLastError())

    def settle(self) -> None:
        """On the CPU: waits for enqueued work and raises its failure. Does nothing on GPUs."""
        if self.device.type == "cpu":
            try:
                self.runtime.settle()
            finally:
                self.check()

    def close(self) -> None:
        """Destroys the group; collective. A second call does nothing."""
        group, self._group = self._group, None
        if group is None:
            return
        with self.runtime.current():
            try:
                self.library.ncclEpGroupDestroy(group, self._stream())
            finally:
                self._kept.clear()
                self._destroy_comm()

    def _destroy_comm(self) -> None:
        comm, self._owned_comm = self._owned_comm, None
        if comm is not None:
            self.library.ncclCommDestroy(comm)

    def _stream(self) -> int | None:
        return self.runtime.stream(None)

    def __enter__(self) -> EpGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        # After an exception the other ranks may never reach a collective call.
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        state = "" if self._group is not None else ", closed"
        return (f"<EpGroup {self.algorithm}, rank {self.rank} of {self.world_size}, "
                f"{self.num_experts} experts, hidden {self.hidden} {self.dtype}, "
                f"max_tokens_per_rank {self.max_tokens_per_rank}, {self.device}{state}>")

    # At the end of the interpreter names of modules may be None already; defaults are not.
    def __del__(self, _warn: Callable[..., None] = warnings.warn,
                _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Closing is collective, and garbage collection runs at different times on each rank.
        if not _ending() and getattr(self, "_group", None) is not None:
            _warn("an EpGroup was not closed", ResourceWarning, stacklevel=2, source=self)
