"""Handles, enumerations and structures of nccl.h and nccl_ep.h as ctypes types.

Names and layouts are those of the C interface (docs/abi.md), and of the first `nccl_ep` package.
"""

from __future__ import annotations

import ctypes
import enum
from typing import Any

ncclResult_t = ctypes.c_int
ncclDataType_t = ctypes.c_int
ncclRedOp_t = ctypes.c_int
ncclComm_t = ctypes.c_void_p
ncclEpGroup_t = ctypes.c_void_p
ncclEpHandle_t = ctypes.c_void_p
cudaStream_t = ctypes.c_void_p
buffer_type = ctypes.c_void_p

CUDA_SUCCESS = 0
CUDA_ERROR_MEMORY_ALLOCATION = 2

NCCL_EP_AUTO = 0

ncclEpAllocFn_t = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)
"""`cudaError_t alloc(void** out, size_t bytes)`; returns CUDA_SUCCESS or an error of CUDA's."""

ncclEpFreeFn_t = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
"""`cudaError_t free(void* data)`."""


class ncclEpAlgorithm_t(enum.IntEnum):
    """How a group moves tokens."""

    NCCL_EP_ALGO_LOW_LATENCY = 0
    NCCL_EP_ALGO_HIGH_THROUGHPUT = 1
    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class ncclEpTensorFlags_t(enum.IntEnum):
    """Flags of a tensor; none are defined."""

    NCCL_EP_TENSOR_FLAG_NONE = 0
    NONE = 0


class ncclEpTensorTag_t(enum.IntEnum):
    """The meaning of a tensor in a call."""

    NCCL_EP_TENSOR_TAG_NONE = 0
    NCCL_EP_TENSOR_TAG_TOKENS = 1
    NCCL_EP_TENSOR_TAG_TOPK_IDX = 2
    NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS = 3
    NCCL_EP_TENSOR_TAG_SCALES = 4
    NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE = 5
    NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_HOST = 6
    NCCL_EP_TENSOR_TAG_TOKENS_PER_EXPERTS = 7
    NONE = 0
    TOKENS = 1
    TOPK_IDX = 2
    TOPK_WEIGHTS = 3
    SCALES = 4
    RECV_EXPERT_COUNTER_DEVICE = 5
    RECV_EXPERT_COUNTER_HOST = 6
    TOKENS_PER_EXPERTS = 7


# C's enumerators are global names; these are, too.
NCCL_EP_ALGO_LOW_LATENCY = int(ncclEpAlgorithm_t.LOW_LATENCY)
NCCL_EP_ALGO_HIGH_THROUGHPUT = int(ncclEpAlgorithm_t.HIGH_THROUGHPUT)
NCCL_EP_TENSOR_FLAG_NONE = 0
NCCL_EP_TENSOR_TAG_NONE = 0
NCCL_EP_TENSOR_TAG_TOKENS = 1
NCCL_EP_TENSOR_TAG_TOPK_IDX = 2
NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS = 3
NCCL_EP_TENSOR_TAG_SCALES = 4
NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE = 5
NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_HOST = 6
NCCL_EP_TENSOR_TAG_TOKENS_PER_EXPERTS = 7


class ncclDataTypeEnum:
    """Numbers of NCCL's element types."""

    ncclInt8 = 0
    ncclChar = 0
    ncclUint8 = 1
    ncclInt32 = 2
    ncclInt = 2
    ncclUint32 = 3
    ncclInt64 = 4
    ncclUint64 = 5
    ncclFloat16 = 6
    ncclHalf = 6
    ncclFloat32 = 7
    ncclFloat = 7
    ncclFloat64 = 8
    ncclDouble = 8
    ncclBfloat16 = 9
    ncclFloat8e4m3 = 10
    ncclFloat8e5m2 = 11
    ncclNumTypes = 12

    _BY_TORCH_NAME = {
        "torch.int8": 0, "torch.uint8": 1, "torch.int32": 2, "torch.uint32": 3, "torch.int64": 4,
        "torch.uint64": 5, "torch.float16": 6, "torch.float32": 7, "torch.float64": 8,
        "torch.bfloat16": 9, "torch.float8_e4m3fn": 10, "torch.float8_e5m2": 11,
        # Types that NCCL has no number for travel as bytes.
        "torch.float8_e8m0fnu": 1, "torch.float4_e2m1fn_x2": 1,
    }

    @classmethod
    def from_torch(cls, dtype: Any) -> int:
        """The number of a torch dtype; ValueError if NCCL lacks the type."""
        number = cls._BY_TORCH_NAME.get(str(dtype))
        if number is None:
            if isinstance(dtype, str):
                raise TypeError(f"dtype: must be a torch.dtype, not str {dtype!r}")
            raise ValueError(f"NCCL has no element type for {dtype}")
        return number

    @classmethod
    def of_scales(cls, dtype: Any) -> int:
        """The same of scales, which travel as they are: if NCCL lacks the type, one of its size."""
        of_size = {1: cls.ncclUint8, 2: cls.ncclFloat16, 4: cls.ncclUint32}
        number = cls._BY_TORCH_NAME.get(str(dtype), of_size.get(dtype.itemsize))
        return cls.from_torch(dtype) if number is None else number


class ncclRedOpTypeEnum:
    """Numbers of NCCL's reductions."""

    ncclSum = 0
    ncclProd = 1
    ncclMax = 2
    ncclMin = 3
    ncclAvg = 4
    ncclNumOps = 5


class ncclUniqueId(ctypes.Structure):
    """The id that all ranks of a new communicator share."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class ncclNDTensor_t(ctypes.Structure):
    """A dense row-major tensor: shape, element type, address, and meaning in a call.

    `data` is an address; whoever fills it in keeps the memory alive until the operations that use
    it have run. The library copies the rest at each call.
    """

    _fields_ = [
        ("version", ctypes.c_uint),
        ("ndim", ctypes.c_uint),
        ("sizes", ctypes.POINTER(ctypes.c_uint)),
        ("strides", ctypes.POINTER(ctypes.c_uint)),
        ("datatype", ncclDataType_t),
        ("data", ctypes.c_void_p),
        ("tag", ctypes.c_uint),
        ("flags", ctypes.c_int),
    ]


class ncclEpGroupConfig_t(ctypes.Structure):
    """Configuration of a group, the same on every rank; nccl_ep.h describes the fields."""

    _fields_ = [
        ("version", ctypes.c_uint),
        ("algorithm", ctypes.c_int),
        ("num_experts", ctypes.c_uint),
        ("max_tokens_per_rank", ctypes.c_uint),
        ("token_size_bytes", ctypes.c_uint),
        ("rdma_buffer_size", ctypes.c_ulong),
        ("num_qp_per_rank", ctypes.c_uint),
        ("num_channels", ctypes.c_uint),
    ]


class ncclEpMemInfo_t(ctypes.Structure):
    """What `ncclEpMemInfo` tells; nccl_ep.h describes the fields."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("object", ctypes.c_uint),
        ("peers", ctypes.c_uint),
        ("offset", ctypes.c_size_t),
        ("bytes", ctypes.c_size_t),
        ("peer_data", ctypes.POINTER(ctypes.c_void_p)),
        ("tensors", ctypes.c_ulong),
        ("plain_tensors", ctypes.c_ulong),
        ("fallbacks", ctypes.c_ulong),
    ]


class ncclEpDispatchConfig_t(ctypes.Structure):
    """Options of a dispatch."""

    _fields_ = [("round_scales", ctypes.c_uint)]


class ncclEpQuery_t(ctypes.Structure):
    """What a selector is told of an operation."""

    _fields_ = [(name, ctypes.c_uint) for name in (
        "size", "operation", "tokens", "top_k", "row_bytes", "ranks", "sms", "symmetric")]


class ncclEpChoice_t(ctypes.Structure):
    """How to run an operation; 0 leaves a field to the library."""

    _fields_ = [(name, ctypes.c_uint) for name in (
        "size", "variant", "blocks", "send_blocks", "threads", "in_order")]


ncclEpSelect_t = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ncclEpQuery_t),
                                  ctypes.POINTER(ncclEpChoice_t))
"""`int select(void* user, const ncclEpQuery_t* query, ncclEpChoice_t* choice)`."""


class ncclEpHandleConfig_t(ctypes.Structure):
    """Options of a handle, as in the first package. C has none, so the library gets NULL."""

    _fields_ = [("use_fp8", ctypes.c_bool)]
