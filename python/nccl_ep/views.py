"""Tensors over memory of the library, and views: those over memory where rank-major rows are left."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from nccl_ep.results import DispatchResult
from nccl_ep.tensors import TensorList


# The device of a tensor that stands for a view until the library has said where that is.
WITHOUT_MEMORY = torch.device("meta")


def check_view(view: bool, by_rank: bool, has_output: bool) -> None:
    """Refuses a view of what has none."""
    if view and (not by_rank or has_output):
        raise ValueError("view: needs layout=\"rank\", and no out")


def without_views(tensors: TensorList) -> TensorList:
    """The list as the call takes it; what stands for a view is no tensor that anybody has to keep."""
    tensors.tensors = [tensor for tensor in tensors.tensors if not tensor.is_meta]
    return tensors


class Views:
    """The memory of a group's views, as bytes."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[int, int], torch.Tensor] = {}

    def shown(self, result: DispatchResult, outputs: TensorList, device: torch.device) -> DispatchResult:
        """The result of a dispatch with its tokens, which `outputs` has first, where the library has left them."""
        like = result.tokens
        address, size = outputs.descriptors[0].data, like.numel() * like.element_size()
        memory = self._bytes.get((address, size))
        if memory is None:
            with torch.inference_mode(False):  # it outlives that mode, in which its views would still be
                memory = self._bytes[address, size] = bytes_at(address, size, device)[1]
        return result._replace(tokens=memory.view(like.dtype).view(like.shape))


def bytes_at(address: int, size: int, device: torch.device) -> tuple[Any, torch.Tensor]:
    """What stands for the memory, and a tensor of its bytes that keeps it alive."""
    if device.type == "cpu":
        kind: Any = type("_OnCpu", (ctypes.c_uint8 * size,), {})  # unlike its base it can be watched
        on_cpu = kind.from_address(address)
        return on_cpu, torch.frombuffer(on_cpu, dtype=torch.uint8)
    on_gpu = _OnGpu(address, size)
    return on_gpu, torch.as_tensor(on_gpu, device=device)


class _OnGpu:
    """Device memory, as torch takes it from other libraries."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
