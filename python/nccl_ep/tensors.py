"""Descriptors of torch tensors for the C interface."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from nccl_ep.types import ncclDataTypeEnum, ncclEpTensorTag_t, ncclNDTensor_t

Tag = ncclEpTensorTag_t


def describe(tensor: torch.Tensor, tag: int) -> ncclNDTensor_t:
    """The descriptor of a contiguous tensor; it keeps the tensor alive."""
    if not tensor.is_contiguous():
        raise ValueError(f"{Tag(tag).name}: the tensor must be contiguous")
    # torch's empty tensors have one dimension more than C's single number; neither is ever passed.
    sizes = (ctypes.c_uint * tensor.dim())(*tensor.shape)
    descriptor = ncclNDTensor_t(
        version=1, ndim=tensor.dim(), sizes=sizes, strides=None,
        datatype=ncclDataTypeEnum.from_torch(tensor.dtype), data=tensor.data_ptr(), tag=tag)
    descriptor.tensor = tensor
    return descriptor


class TensorList:
    """A list of tagged tensors as C takes it. Entries that are None are left out."""

    def __init__(self, *tagged: tuple[int, torch.Tensor | None]) -> None:
        self.tensors = [tensor for _, tensor in tagged if tensor is not None]
        descriptors = [describe(tensor, tag) for tag, tensor in tagged if tensor is not None]
        pointers = [ctypes.pointer(each) for each in descriptors]
        self.count = len(pointers)
        self.array: Any = (ctypes.POINTER(ncclNDTensor_t) * self.count)(*pointers)
        self._descriptors = descriptors


def checked(name: str, tensor: torch.Tensor, shape: Sequence[int | None], device: torch.device,
            dtype: torch.dtype | None = None) -> torch.Tensor:
    """`tensor`, made contiguous, if it has this shape, device and type; else ValueError.

    What the library can see it checks itself; a tensor on another device it cannot. An extent of
    None may be any.
    """
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape))
    if not fits:
        wanted = ", ".join("any" if each is None else str(each) for each in shape)
        raise ValueError(f"{name}: has shape {list(tensor.shape)}, expected [{wanted}]")
    if tensor.device != device:
        raise ValueError(f"{name}: is on {tensor.device}, the group on {device}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name}: has type {tensor.dtype}, expected {dtype}")
    return tensor.contiguous()
