"""Descriptors of torch tensors for the C interface."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from nccl_ep.arguments import LARGEST, require_no_gradient, require_tensor
from nccl_ep.types import ncclDataTypeEnum, ncclEpTensorTag_t, ncclNDTensor_t

Tag = ncclEpTensorTag_t
_Pointer = ctypes.POINTER(ncclNDTensor_t)
_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8,
                       torch.uint64, torch.uint32, torch.uint16, torch.uint8))


@functools.lru_cache(maxsize=256)
def _form(shape: tuple[int, ...], dtype: torch.dtype, tag: int) -> ncclNDTensor_t:
    """A descriptor without an address. Shapes recur, and copying a descriptor is faster."""
    if max(shape, default=0) > LARGEST:
        # ctypes would truncate it silently.
        raise ValueError(f"{Tag(tag).name}: has shape {list(shape)}, whose extents must be at most "
                         f"{LARGEST}")
    # torch's empty tensors have one more dimension than C's single number; neither is ever passed.
    sizes = (ctypes.c_uint * len(shape))(*shape)
    number = ncclDataTypeEnum.of_scales if tag == Tag.SCALES else ncclDataTypeEnum.from_torch
    return ncclNDTensor_t(version=1, ndim=len(shape), sizes=sizes, strides=None, datatype=number(dtype), tag=tag)


def describe(tensor: torch.Tensor, tag: int) -> ncclNDTensor_t:
    """The descriptor of a contiguous tensor, or of scales, which may lie by columns, or with a pitch; it keeps the
    tensor alive."""
    descriptor = _dense(tensor, tag)
    descriptor.data, descriptor.tensor = tensor.data_ptr(), tensor
    if not tensor.is_contiguous():
        if tag != Tag.SCALES:
            raise ValueError(f"{Tag(tag).name}: the tensor must be contiguous")
        if max(tensor.stride()) > LARGEST:
            raise ValueError(f"{Tag(tag).name}: strides must be at most {LARGEST}")
        strides = (ctypes.c_uint * tensor.dim())(*tensor.stride())
        descriptor.strides = strides
        descriptor.own_strides = strides
    return descriptor


def _dense(tensor: torch.Tensor, tag: int) -> ncclNDTensor_t:
    """The descriptor without an address and strides."""
    form = _form(tensor.shape, tensor.dtype, tag)
    descriptor = ncclNDTensor_t.from_buffer_copy(form)
    # The form owns the sizes.
    descriptor.form = form
    return descriptor


class _Frame(NamedTuple):
    """Descriptors, and the array of pointers to them."""

    descriptors: list[ncclNDTensor_t]
    array: Any


# Of contiguous tensors with these tags, shapes and types. Filling one again takes a third of the time of a new one.
_Frames = dict[Any, list[_Frame]]
_unused: _Frames = {}
_MOST_FORMS = 256


class TensorList:
    """A list of tagged tensors as C takes it. None entries are omitted."""

    __slots__ = ("_form", "_frame", "tensors")

    def __init__(self, *tagged: tuple[int, torch.Tensor | None]) -> None:
        self.tensors: list[torch.Tensor] = []
        form: list[Any] = []
        is_dense = True
        for tag, tensor in tagged:
            if tensor is not None:
                self.tensors.append(tensor)
                form += tag, tensor.shape, tensor.dtype
                is_dense = is_dense and tensor.is_contiguous()
        self._form = tuple(form) if is_dense else None
        try:
            self._frame = _unused[self._form].pop()
        except LookupError:
            new = _dense if is_dense else describe
            made = [new(tensor, tag) for tag, tensor in tagged if tensor is not None]
            self._frame = _Frame(made, (_Pointer * len(made))(*map(ctypes.pointer, made)))
        if is_dense:
            for descriptor, tensor in zip(self._frame.descriptors, self.tensors):
                descriptor.data = tensor.data_ptr()

    @property
    def count(self) -> int:
        """How many there are for C."""
        return len(self._frame.descriptors)

    @property
    def descriptors(self) -> list[ncclNDTensor_t]:
        """Of the tensors, in their order."""
        return self._frame.descriptors

    @property
    def array(self) -> Any:
        """Pointers to the descriptors."""
        return self._frame.array

    # Names of modules may be None at the end of the interpreter; defaults are not.
    def __del__(self, _unused: _Frames = _unused) -> None:
        form = getattr(self, "_form", None)
        if form is None or not hasattr(self, "_frame"):
            return
        unused = _unused.get(form)
        if unused is not None:
            unused.append(self._frame)
        elif len(_unused) < _MOST_FORMS:
            _unused[form] = [self._frame]
        else:
            _unused.clear()


def checked(name: str, tensor: torch.Tensor, shape: Sequence[int | str], device: torch.device,
            dtype: torch.dtype | None = None) -> torch.Tensor:
    """`tensor`, made contiguous, if it has this shape, device and type; else ValueError, or
    TypeError if it is no tensor.

    The library itself checks what it can see; it cannot see a tensor's device. An extent that is a
    name, such as "H", matches any.
    """
    _require_shape(name, tensor, shape)
    if tensor.device != device:
        raise ValueError(f"{name}: is on {tensor.device}, the group on {device}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name}: has type {tensor.dtype}, expected {dtype}")
    # The library sees the memory only; torch may keep a pending negation beside it.
    return tensor if tensor.is_contiguous() and not tensor.is_neg() else tensor.resolve_neg().contiguous()


def _require_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | str]) -> None:
    # What most tensors are needs no closer look.
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_nested:
        require_tensor(name, tensor)
    have = tensor.shape
    fits = len(have) == len(shape)
    for extent, want in zip(have, shape):
        # A loop takes half the time of all().
        fits = fits and (extent == want or isinstance(want, str))
    if not fits:
        raise ValueError(f"{name}: has shape {list(have)}, expected "
                         f"[{', '.join(map(str, shape))}]")


def checked_output(name: str, tensor: torch.Tensor, shape: Sequence[int | str],
                   device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` itself, to write to, if `checked` would return it unchanged; else ValueError."""
    require_tensor(name, tensor)
    if not tensor.is_contiguous() or tensor.is_neg():
        raise ValueError(f"{name}: must be contiguous, and no negative view")
    checked(name, tensor, shape, device, dtype)
    require_no_gradient(name, tensor)
    return tensor


def written(tensors: Iterable[torch.Tensor]) -> None:
    """Tells autograd that the library has written, or will have, to these tensors of a caller.

    A graph that saved one of them then refuses its backward, instead of using other values.
    """
    for tensor in tensors:
        # Those of inference mode have no counter, and no graph saves them.
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def checked_integers(name: str, tensor: torch.Tensor, shape: Sequence[int | str],
                     device: torch.device) -> torch.Tensor:
    """As `checked`, for ids of any integer type; returns int64, without a copy where possible."""
    _require_shape(name, tensor, shape)
    if tensor.dtype not in _INTEGERS:
        raise ValueError(f"{name}: has type {tensor.dtype}, expected integers")
    # Torch knows little more of unsigned types than how to convert them, so that comes first.
    return checked(name, tensor if tensor.dtype == torch.int64 else tensor.to(torch.int64), shape, device)
