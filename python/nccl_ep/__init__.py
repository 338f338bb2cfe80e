"""Expert-parallel communication for Mixture-of-Experts models: libnccl_ep in Python.

Two layers: `NCCLLibrary` has the C functions as methods, under the names of the first `nccl_ep`
package. `EpGroup`, `EpHandle`, `nccl_ep.autograd`, `nccl_ep.layers` work on torch tensors, on GPUs
or, with the CPU stand-ins, on the CPU; they need torch, the first layer does not.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from nccl_ep.requirement import require_torch

__version__ = "0.1.0"

# Names that need torch, and their modules, which load at first use.
_RESULTS = ("DispatchResult", "LowLatencyResult", "LowLatencyScaledResult", "RankMajorResult",
            "ScaledResult", "WeightedResult", "WeightedScaledResult")
_CHOICES = ("Choice", "Query", "Variant")
_WITH_TORCH = {"EpGroup": "nccl_ep.group", "EpHandle": "nccl_ep.handle",
               **dict.fromkeys(_RESULTS, "nccl_ep.results"),
               **dict.fromkeys(_CHOICES, "nccl_ep.choices"),
               "MoeShape": "nccl_ep.tuning", "capabilities": "nccl_ep.runtime",
               "tune": "nccl_ep.tuning"}
_MODULES = ("autograd", "deep_ep", "layers", "memory", "testing", "tuning")

__all__ = [
    "CUDA_ERROR_MEMORY_ALLOCATION", "CUDA_SUCCESS", "HAVE_NCCL_EP", "HAVE_TORCH", "InternalError",
    "InvalidArgumentError", "InvalidUsageError", "NCCLLibrary", "NCCL_EP_ALGO_HIGH_THROUGHPUT",
    "NCCL_EP_ALGO_LOW_LATENCY", "NcclEpError", "NcclSystemError", "RemoteError",
    "UnhandledCudaError", "__version__", "get_nccl_comm_from_group", "memory", "ncclComm_t",
    "ncclDataTypeEnum", "ncclEpAlgorithm_t", "ncclEpAllocFn_t", "ncclEpDispatchConfig_t",
    "ncclEpFreeFn_t", "ncclEpGroupConfig_t", "ncclEpHandleConfig_t", "ncclEpTensorTag_t",
    "ncclNDTensor_t", "testing",
]

try:
    from nccl_ep.errors import (InternalError, InvalidArgumentError, InvalidUsageError, NcclEpError,
                                NcclSystemError, RemoteError, UnhandledCudaError)
    from nccl_ep.nccl_wrapper import (CUDA_ERROR_MEMORY_ALLOCATION, CUDA_SUCCESS, HAVE_TORCH,
                                      NCCL_EP_ALGO_HIGH_THROUGHPUT, NCCL_EP_ALGO_LOW_LATENCY,
                                      NCCLLibrary, get_nccl_comm_from_group, ncclComm_t,
                                      ncclDataTypeEnum, ncclEpAlgorithm_t, ncclEpAllocFn_t,
                                      ncclEpDispatchConfig_t, ncclEpFreeFn_t, ncclEpGroupConfig_t,
                                      ncclEpHandleConfig_t, ncclEpTensorTag_t, ncclNDTensor_t)

    HAVE_NCCL_EP = True
    if HAVE_TORCH:
        __all__ += [*_RESULTS, *_CHOICES, "EpGroup", "EpHandle", "MoeShape", "autograd",
                    "capabilities", "deep_ep", "layers", "tune", "tuning"]
except ImportError as error:  # such as a Python without ctypes
    warnings.warn(f"nccl_ep is of no use here: {error}", stacklevel=2)
    HAVE_NCCL_EP = False

if TYPE_CHECKING:
    from nccl_ep import (autograd as autograd, deep_ep as deep_ep, layers as layers,
                         memory as memory, testing as testing, tuning as tuning)
    from nccl_ep.choices import Choice as Choice, Query as Query, Variant as Variant
    from nccl_ep.group import EpGroup as EpGroup
    from nccl_ep.handle import EpHandle as EpHandle
    from nccl_ep.results import (DispatchResult as DispatchResult,
                                 LowLatencyResult as LowLatencyResult,
                                 LowLatencyScaledResult as LowLatencyScaledResult,
                                 RankMajorResult as RankMajorResult,
                                 ScaledResult as ScaledResult,
                                 WeightedResult as WeightedResult,
                                 WeightedScaledResult as WeightedScaledResult)
    from nccl_ep.runtime import capabilities as capabilities
    from nccl_ep.tuning import MoeShape as MoeShape, tune as tune


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        require_torch(f"nccl_ep.{name}")
        return getattr(importlib.import_module(_WITH_TORCH[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"nccl_ep.{name}")
    raise AttributeError(f"module 'nccl_ep' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
