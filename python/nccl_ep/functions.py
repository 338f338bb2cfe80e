"""The C functions that the package calls, with their types, as one table."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

from nccl_ep.types import (buffer_type, cudaStream_t, ncclComm_t, ncclDataType_t, ncclEpAllocFn_t,
                           ncclEpChoice_t, ncclEpDispatchConfig_t, ncclEpFreeFn_t, ncclEpGroup_t,
                           ncclEpGroupConfig_t, ncclEpHandle_t, ncclEpMemInfo_t, ncclEpSelect_t,
                           ncclNDTensor_t,
                           ncclRedOp_t, ncclResult_t, ncclUniqueId)

_Tensor = ctypes.POINTER(ncclNDTensor_t)
_Tensors = ctypes.POINTER(_Tensor)
_Number = ctypes.POINTER(ctypes.c_int)


@dataclasses.dataclass(frozen=True)
class Function:
    """A C function: its name, the type of its result, the types of its arguments."""

    name: str
    restype: Any
    argtypes: list[Any]

    def bind(self, table: dict[str, Any], library: ctypes.CDLL) -> bool:
        """Puts it into `table`, if the library has it; whether it does."""
        try:
            # Indexing, unlike an attribute, makes a new object, so its types affect no other user.
            found = library[self.name]
        except AttributeError:
            return False
        found.restype = self.restype
        found.argtypes = self.argtypes
        table[self.name] = found
        return True


BASE_FUNCTIONS = [
    Function("ncclGetErrorString", ctypes.c_char_p, [ncclResult_t]),
    Function("ncclGetVersion", ncclResult_t, [_Number]),
    Function("ncclGetUniqueId", ncclResult_t, [ctypes.POINTER(ncclUniqueId)]),
    Function("ncclCommInitRank", ncclResult_t,
             [ctypes.POINTER(ncclComm_t), ctypes.c_int, ncclUniqueId, ctypes.c_int]),
    Function("ncclAllReduce", ncclResult_t,
             [buffer_type, buffer_type, ctypes.c_size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
              cudaStream_t]),
    Function("ncclCommCount", ncclResult_t, [ncclComm_t, _Number]),
    Function("ncclCommUserRank", ncclResult_t, [ncclComm_t, _Number]),
    Function("ncclCommDestroy", ncclResult_t, [ncclComm_t]),
]

_OPERATION = [_Tensors, ctypes.c_uint, _Tensors, ctypes.c_uint, _Tensors, ctypes.c_uint,
              ctypes.c_uint]

EP_FUNCTIONS = [
    Function("ncclEpCreateGroup", ncclResult_t,
             [ctypes.POINTER(ncclEpGroup_t), ncclComm_t, ctypes.POINTER(ncclEpGroupConfig_t),
              cudaStream_t, ncclEpAllocFn_t, ncclEpFreeFn_t]),
    Function("ncclEpGroupDestroy", ncclResult_t, [ncclEpGroup_t, cudaStream_t]),
    Function("ncclEpTensorCreate", ncclResult_t,
             [ncclEpGroup_t, _Tensor, ctypes.c_uint, ncclDataType_t, ctypes.c_int,
              *[ctypes.c_uint] * 5]),
    Function("ncclEpTensorDestroy", ncclResult_t, [ncclEpGroup_t, _Tensor]),
    Function("ncclEpCreateHandle", ncclResult_t,
             [ctypes.POINTER(ncclEpHandle_t), ncclEpGroup_t, _Tensor, _Tensors, ctypes.c_uint,
              ctypes.c_void_p, cudaStream_t, ctypes.c_bool]),
    Function("ncclEpHandleDestroy", ncclResult_t, [ncclEpHandle_t]),
    Function("ncclEpDispatch", ncclResult_t,
             [ncclEpHandle_t, *_OPERATION, ctypes.POINTER(ncclEpDispatchConfig_t), cudaStream_t]),
    Function("ncclEpCombine", ncclResult_t,
             [ncclEpHandle_t, *_OPERATION, ctypes.c_void_p, cudaStream_t]),
    Function("ncclEpHandleGetNumRecvTokens", ncclResult_t,
             [ncclEpHandle_t, ctypes.POINTER(ctypes.c_uint)]),
    Function("ncclEpComplete", ncclResult_t, [ncclEpHandle_t, ctypes.c_void_p, cudaStream_t]),
]

# Additions of this library: another libnccl_ep.so may lack them.
EXTRA_FUNCTIONS = [
    Function("ncclEpGetVersion", ncclResult_t, [_Number]),
    Function("ncclEpGetLastError", ctypes.c_char_p, []),
    Function("ncclEpGetAsyncError", ncclResult_t, [ncclEpGroup_t, ctypes.POINTER(ncclResult_t)]),
    Function("ncclEpSetChoice", ncclResult_t,
             [ncclEpGroup_t, ctypes.c_uint, ctypes.POINTER(ncclEpChoice_t)]),
    Function("ncclEpSetSelector", ncclResult_t, [ncclEpGroup_t, ncclEpSelect_t, ctypes.c_void_p]),
    Function("ncclEpGroupCountRows", ncclResult_t, [ncclEpGroup_t, ctypes.c_void_p]),
    Function("ncclEpHandleWaitNumRecvTokens", ncclResult_t,
             [ncclEpHandle_t, ctypes.c_uint, ctypes.POINTER(ctypes.c_uint)]),
    Function("ncclEpGroupTimeWaits", ncclResult_t, [ncclEpGroup_t, ctypes.c_void_p]),
    Function("ncclEpGroupTimeCombineWaits", ncclResult_t, [ncclEpGroup_t, ctypes.c_void_p]),
    Function("ncclEpHandleOpen", ncclResult_t,
             [ctypes.POINTER(ncclEpHandle_t), ncclEpGroup_t, ctypes.c_uint]),
    Function("ncclEpHandleOpenBounded", ncclResult_t,
             [ctypes.POINTER(ncclEpHandle_t), ncclEpGroup_t, ctypes.c_uint, ctypes.c_uint]),
    Function("ncclEpHandleUpdate", ncclResult_t,
             [ncclEpHandle_t, _Tensor, _Tensors, ctypes.c_uint, cudaStream_t]),
    Function("ncclEpMemAlloc", ncclResult_t,
             [ncclEpGroup_t, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]),
    Function("ncclEpMemFree", ncclResult_t, [ncclEpGroup_t, ctypes.c_void_p]),
    Function("ncclEpMemRegister", ncclResult_t,
             [ncclEpGroup_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]),
    Function("ncclEpMemDeregister", ncclResult_t, [ncclEpGroup_t, ctypes.c_void_p]),
    Function("ncclEpMemInfo", ncclResult_t,
             [ncclEpGroup_t, ctypes.c_void_p, ctypes.POINTER(ncclEpMemInfo_t)]),
    Function("ncclEpPoolUse", ncclResult_t, [ncclEpGroup_t, ctypes.c_void_p, ctypes.c_size_t]),
]
