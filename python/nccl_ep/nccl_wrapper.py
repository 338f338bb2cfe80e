"""The C functions as methods: the names, signatures and results of the first `nccl_ep` package.

Refusals become `NcclEpError` with the library's own text. The methods keep alive what C still
uses; the caller keeps the memory behind tensor addresses alive.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from typing import Any, ClassVar

from nccl_ep import functions, library_search
from nccl_ep.errors import NcclEpError, failure
from nccl_ep.functions import Function
from nccl_ep.rendezvous import get_nccl_comm_from_group
from nccl_ep.types import (CUDA_ERROR_MEMORY_ALLOCATION, CUDA_SUCCESS, NCCL_EP_ALGO_HIGH_THROUGHPUT,
                           NCCL_EP_ALGO_LOW_LATENCY, NCCL_EP_AUTO, NCCL_EP_TENSOR_FLAG_NONE,
                           NCCL_EP_TENSOR_TAG_NONE,
                           NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE,
                           NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_HOST,
                           NCCL_EP_TENSOR_TAG_SCALES, NCCL_EP_TENSOR_TAG_TOKENS,
                           NCCL_EP_TENSOR_TAG_TOKENS_PER_EXPERTS, NCCL_EP_TENSOR_TAG_TOPK_IDX,
                           NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, buffer_type, cudaStream_t, ncclComm_t,
                           ncclDataType_t, ncclDataTypeEnum, ncclEpAlgorithm_t, ncclEpAllocFn_t,
                           ncclEpDispatchConfig_t, ncclEpFreeFn_t, ncclEpGroup_t,
                           ncclEpGroupConfig_t, ncclEpHandle_t, ncclEpHandleConfig_t,
                           ncclEpMemInfo_t, ncclEpSelect_t, ncclEpTensorFlags_t, ncclEpTensorTag_t,
                           ncclNDTensor_t, ncclRedOp_t, ncclRedOpTypeEnum, ncclResult_t, ncclUniqueId)

HAVE_TORCH = importlib.util.find_spec("torch") is not None

__all__ = [
    "CUDA_ERROR_MEMORY_ALLOCATION", "CUDA_SUCCESS", "Function", "HAVE_TORCH", "NCCLLibrary",
    "NCCL_EP_ALGO_HIGH_THROUGHPUT", "NCCL_EP_ALGO_LOW_LATENCY", "NCCL_EP_AUTO",
    "NCCL_EP_TENSOR_FLAG_NONE", "NCCL_EP_TENSOR_TAG_NONE",
    "NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE", "NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_HOST",
    "NCCL_EP_TENSOR_TAG_SCALES", "NCCL_EP_TENSOR_TAG_TOKENS",
    "NCCL_EP_TENSOR_TAG_TOKENS_PER_EXPERTS", "NCCL_EP_TENSOR_TAG_TOPK_IDX",
    "NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS", "NcclEpError", "buffer_type", "cudaStream_t",
    "get_nccl_comm_from_group", "ncclComm_t", "ncclDataTypeEnum", "ncclDataType_t",
    "ncclEpAlgorithm_t", "ncclEpAllocFn_t", "ncclEpDispatchConfig_t", "ncclEpFreeFn_t",
    "ncclEpGroupConfig_t", "ncclEpGroup_t", "ncclEpHandleConfig_t", "ncclEpHandle_t",
    "ncclEpTensorFlags_t", "ncclEpTensorTag_t", "ncclNDTensor_t", "ncclRedOpTypeEnum",
    "ncclRedOp_t", "ncclResult_t", "ncclUniqueId",
]


class NCCLLibrary:
    """libnccl_ep.so and the NCCL beside it.

    `so_file` is the library's path; without it, NCCL_EP_LIBRARY, the package's own folder,
    NCCL_HOME and the loader are searched in this order. A path of libnccl.so itself serves for
    the base functions; `ep_available` is then False.
    """

    exported_functions: ClassVar[list[Function]] = [*functions.BASE_FUNCTIONS,
                                                    *functions.EP_FUNCTIONS]
    path_to_library_cache: ClassVar[dict[str, ctypes.CDLL]] = {}
    path_to_base_cache: ClassVar[dict[str, ctypes.CDLL]] = {}
    path_to_dict_mapping: ClassVar[dict[str, dict[str, Any]]] = {}
    # C may call an allocator as long as its tensors live, possibly longer than their group.
    _callbacks: ClassVar[dict[int | None, Any]] = {}

    def __init__(self, so_file: str | os.PathLike[str] | None = None) -> None:
        path = (library_search.find_library() if so_file is None
                else library_search.existing(os.fspath(so_file), "so_file"))
        if path not in self.path_to_dict_mapping:
            library, base, table = _load(path)
            self.path_to_library_cache[path] = library
            self.path_to_base_cache[path] = base
            self.path_to_dict_mapping[path] = table
        self.path = path
        self.lib = self.path_to_library_cache[path]
        self.base = self.path_to_base_cache[path]
        self._funcs = self.path_to_dict_mapping[path]
        self.ep_available = all(each.name in self._funcs for each in functions.EP_FUNCTIONS)

    def __reduce__(self) -> tuple[type[NCCLLibrary], tuple[str]]:
        return type(self), (self.path,)

    def __repr__(self) -> str:
        return f"<NCCLLibrary {self.path}{'' if self.ep_available else ', without nccl_ep'}>"

    # --- Results ------------------------------------------------------------------------------

    def NCCL_CHECK(self, result: int) -> None:
        """Raises `NcclEpError`, a RuntimeError, unless `result` is ncclSuccess."""
        self._check("", result)

    def ncclGetErrorString(self, result: int) -> str:
        """NCCL's text for a result."""
        text = self._funcs["ncclGetErrorString"](result)
        return text.decode(errors="replace") if text else "unknown"

    def ncclEpGetLastError(self) -> str:
        """One line about this library's last refusal in this thread; empty if there was none."""
        get = self._funcs.get("ncclEpGetLastError")
        return get().decode(errors="replace") if get else ""

    def _check(self, name: str, result: int) -> None:
        if result != 0:
            # Only this library's calls leave a text; do not report an older one for NCCL's calls.
            detail = (self.ncclEpGetLastError() if name.startswith("ncclEp") else
                      name + self._of_another_copy(name))
            raise failure(result, self.ncclGetErrorString(result), detail)

    def _of_another_copy(self, name: str) -> str:
        """What is most likely wrong if NCCL refuses to read a communicator."""
        if name not in ("ncclCommCount", "ncclCommUserRank"):
            return ""
        used, others = library_search.other_copies_of_nccl(self.base)
        return (f": of several NCCLs in this process {used} is used, and a communicator of "
                f"{', '.join(others)} is invalid there: NCCL_EP_NCCL_LIBRARY chooses"
                if others else "")

    def has(self, name: str) -> bool:
        """Whether the library has the C function `name`, one of those in `functions`."""
        return name in self._funcs

    def _call(self, name: str, *arguments: Any) -> None:
        function = self._funcs.get(name)
        if function is None:
            raise RuntimeError(f"{self.path} has no {name}: it is not libnccl_ep.so, or an old one")
        try:
            result = function(*arguments)
        except ctypes.ArgumentError as error:
            raise TypeError(f"{name}: {error}; pointers are of ctypes, and EpGroup and EpHandle take "
                            "torch tensors") from None
        self._check(name, result)

    # --- NCCL ---------------------------------------------------------------------------------

    def ncclGetRawVersion(self) -> int:
        """NCCL's version as NCCL counts it: 22809 is 2.28.9."""
        version = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(version))
        return version.value

    def ncclGetVersion(self) -> str:
        """NCCL's version, such as "2.28.9"."""
        raw = self.ncclGetRawVersion()
        # Before 2.9 the factor of the major version was 1000.
        base = 10000 if raw >= 10000 else 1000
        return f"{raw // base}.{raw % base // 100}.{raw % 100}"

    def ncclGetUniqueId(self) -> ncclUniqueId:
        """The id that the ranks of a new communicator share; one rank makes it."""
        unique_id = ncclUniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        return unique_id

    def ncclCommInitRank(self, world_size: int, unique_id: ncclUniqueId, rank: int) -> ncclComm_t:
        """A communicator; every rank calls it with its own GPU current."""
        comm = ncclComm_t()
        self._call("ncclCommInitRank", ctypes.byref(comm), world_size, unique_id, rank)
        return comm

    def ncclCommDestroy(self, comm: ncclComm_t) -> None:
        """Destroys a communicator, after the groups made from it."""
        self._call("ncclCommDestroy", comm)

    def ncclCommCount(self, comm: ncclComm_t) -> int:
        """The number of ranks."""
        count = ctypes.c_int()
        self._call("ncclCommCount", comm, ctypes.byref(count))
        return count.value

    def ncclCommUserRank(self, comm: ncclComm_t) -> int:
        """This process's rank."""
        rank = ctypes.c_int()
        self._call("ncclCommUserRank", comm, ctypes.byref(rank))
        return rank.value

    def ncclAllReduce(self, sendbuff: Any, recvbuff: Any, count: int, datatype: int, op: int,
                      comm: Any, stream: Any) -> None:
        """Reduces `count` elements of all ranks; addresses are of device memory."""
        self._call("ncclAllReduce", _address(sendbuff), _address(recvbuff), count, datatype, op,
                   comm, stream)

    # --- Groups and tensors -------------------------------------------------------------------

    def ncclEpCreateGroup(self, comm: Any, config: Any, stream: Any = None, alloc_fn: Any = None,
                          free_fn: Any = None) -> ncclEpGroup_t:
        """A group over all ranks of `comm`; collective.

        `config` is an `ncclEpGroupConfig_t`. `alloc_fn` and `free_fn` are made by `ncclEpAllocFn_t`
        and `ncclEpFreeFn_t`; None means cudaMalloc and cudaFree.
        """
        alloc = alloc_fn if alloc_fn is not None else ncclEpAllocFn_t()
        free = free_fn if free_fn is not None else ncclEpFreeFn_t()
        for each in (alloc_fn, free_fn):
            if each is not None:
                self._callbacks[ctypes.cast(each, ctypes.c_void_p).value] = each
        group = ncclEpGroup_t()
        self._call("ncclEpCreateGroup", ctypes.byref(group), comm, _pointer(config), stream, alloc,
                   free)
        return group

    def ncclEpGroupDestroy(self, group: Any, stream: Any = None) -> None:
        """Destroys a group; collective."""
        self._call("ncclEpGroupDestroy", group, stream)

    def ncclEpTensorCreate(self, group: Any, ndim: int, datatype: int, tag: int,
                           *sizes: int) -> ncclNDTensor_t:
        """A tensor of `ndim` extents `sizes` in memory of the group's allocator, uninitialised."""
        tensor = ncclNDTensor_t()
        extents = (*sizes, 1, 1, 1, 1, 1)[:5]
        self._call("ncclEpTensorCreate", group, ctypes.byref(tensor), ndim, datatype, tag, *extents)
        return tensor

    def ncclEpTensorDestroy(self, group: Any, tensor: Any) -> None:
        """Frees what `ncclEpTensorCreate` made, before or after the group is destroyed."""
        self._call("ncclEpTensorDestroy", group, _pointer(tensor))

    def ncclEpGetAsyncError(self, group: Any) -> int:
        """ncclSuccess, or the result of the first operation that failed while running."""
        result = ncclResult_t()
        self._call("ncclEpGetAsyncError", group, ctypes.byref(result))
        return result.value

    def ncclEpSetChoice(self, group: Any, operation: int, choice: Any = None) -> None:
        """Chooses how to run an operation from now on: an `ncclEpChoice_t`, None for the own way."""
        self._call("ncclEpSetChoice", group, operation, _pointer(choice))

    def ncclEpSetSelector(self, group: Any, select: Any, user: Any = None) -> None:
        """Lets an `ncclEpSelect_t` choose, which the caller keeps until it is replaced; None ends that."""
        self._call("ncclEpSetSelector", group, ncclEpSelect_t() if select is None else select, user)

    def ncclEpGroupCountRows(self, group: Any, rows_of_expert: Any) -> None:
        """Dispatches add the rows of each local expert to int64 [L] there from now on; None ends that."""
        self._call("ncclEpGroupCountRows", group, rows_of_expert)

    def ncclEpGroupTimeWaits(self, group: Any, ns_of_source: Any) -> None:
        """LL dispatches add the nanoseconds of their waits to int64 [R] there from now on; None ends that."""
        self._call("ncclEpGroupTimeWaits", group, ns_of_source)

    def ncclEpGroupTimeCombineWaits(self, group: Any, ns_of_source: Any) -> None:
        """The same of combines, LL and HT."""
        self._call("ncclEpGroupTimeCombineWaits", group, ns_of_source)

    def ncclEpGetVersion(self) -> int:
        """The version of libnccl_ep: MAJOR * 10000 + MINOR * 100 + PATCH."""
        version = ctypes.c_int()
        self._call("ncclEpGetVersion", ctypes.byref(version))
        return version.value

    # --- Memory that peers map ----------------------------------------------------------------

    def ncclEpMemAlloc(self, group: Any, size: int) -> int:
        """The address of `size` bytes of new memory that peers map; collective."""
        address = ctypes.c_void_p()
        self._call("ncclEpMemAlloc", group, ctypes.byref(address), size)
        return address.value or 0

    def ncclEpMemFree(self, group: Any, address: int) -> None:
        """Frees what `ncclEpMemAlloc` gave; collective."""
        self._call("ncclEpMemFree", group, address)

    def ncclEpMemRegister(self, group: Any, address: int, size: int, window: Any = None) -> None:
        """Lets peers map memory of the caller's; collective."""
        self._call("ncclEpMemRegister", group, address, size, window)

    def ncclEpMemDeregister(self, group: Any, address: int) -> None:
        """Ends what `ncclEpMemRegister` began; collective."""
        self._call("ncclEpMemDeregister", group, address)

    def ncclEpMemInfo(self, group: Any, address: int) -> ncclEpMemInfo_t:
        """Which memory that peers map the byte at `address` is in."""
        info = ncclEpMemInfo_t(size=ctypes.sizeof(ncclEpMemInfo_t))
        self._call("ncclEpMemInfo", group, address, ctypes.byref(info))
        return info

    def ncclEpPoolUse(self, group: Any, address: int | None, size: int) -> None:
        """From which bytes of such memory `ncclEpPoolAlloc` of this thread cuts; None: from none."""
        self._call("ncclEpPoolUse", group, address, size)

    # --- Handles ------------------------------------------------------------------------------

    def ncclEpCreateHandle(self, group: Any, topk_tensor: Any, config: Any = None,
                           stream: Any = None,
                           local_tensors: Sequence[ncclNDTensor_t] | None = None,
                           use_fp8: bool = False) -> ncclEpHandle_t:
        """One routing: `topk_tensor` is TOPK_IDX, int64 [T, K]. Collective in HT.

        `config` is an `ncclEpHandleConfig_t` or None. `local_tensors`: in HT a counter, int32 [L].
        """
        if isinstance(config, ncclEpHandleConfig_t):
            use_fp8 = use_fp8 or config.use_fp8
        array, count = tensor_list(local_tensors or ())
        handle = ncclEpHandle_t()
        self._call("ncclEpCreateHandle", ctypes.byref(handle), group, _pointer(topk_tensor), array,
                   count, None, stream, bool(use_fp8))
        return handle

    def ncclEpHandleOpen(self, group: Any, expert_alignment: int = 0) -> ncclEpHandle_t:
        """A handle without a routing; local."""
        handle = ncclEpHandle_t()
        self._call("ncclEpHandleOpen", ctypes.byref(handle), group, expert_alignment)
        return handle

    def ncclEpHandleOpenBounded(self, group: Any, expert_alignment: int, max_rows: int) -> ncclEpHandle_t:
        """The same with rows by expert, of which an update drops those beyond `max_rows`; local."""
        handle = ncclEpHandle_t()
        self._call("ncclEpHandleOpenBounded", ctypes.byref(handle), group, expert_alignment, max_rows)
        return handle

    def ncclEpHandleUpdate(self, handle: Any, topk_tensor: Any,
                           local_tensors: Sequence[ncclNDTensor_t] | None = None, stream: Any = None) -> None:
        """Gives a handle a routing; arguments as in `ncclEpCreateHandle`, and collective like that."""
        self._call("ncclEpHandleUpdate", handle, _pointer(topk_tensor), *tensor_list(local_tensors or ()), stream)

    def ncclEpHandleDestroy(self, handle: Any) -> None:
        """Destroys a handle; local."""
        self._call("ncclEpHandleDestroy", handle)

    def ncclEpHandleGetNumRecvTokens(self, handle: Any) -> int:
        """Number of rows that an HT dispatch can deliver here."""
        rows = ctypes.c_uint()
        self._call("ncclEpHandleGetNumRecvTokens", handle, ctypes.byref(rows))
        return rows.value

    def ncclEpHandleWaitNumRecvTokens(self, handle: Any, timeout_ms: int) -> int | None:
        """The same; None if it is not known after so many milliseconds."""
        rows = ctypes.c_uint()
        result = self._funcs["ncclEpHandleWaitNumRecvTokens"](handle, timeout_ms, ctypes.byref(rows))
        if result == 7:  # ncclInProgress
            return None
        self._check("ncclEpHandleWaitNumRecvTokens", result)
        return rows.value

    # --- Operations ---------------------------------------------------------------------------

    def ncclEpDispatch(self, handle: Any, inputs: Any, num_inputs: int, outputs: Any,
                       num_outputs: int, local_tensors: Any, num_local_tensors: int,
                       send_only: int = 0, config: Any = None, stream: Any = None) -> None:
        """Sends tokens to their experts. The lists are arrays of POINTER(ncclNDTensor_t)."""
        self._call("ncclEpDispatch", handle, _tensors(inputs), num_inputs, _tensors(outputs),
                   num_outputs, _tensors(local_tensors), num_local_tensors, int(send_only),
                   _pointer(config), stream)

    def ncclEpCombine(self, handle: Any, inputs: Any, num_inputs: int, outputs: Any,
                      num_outputs: int, local_tensors: Any, num_local_tensors: int,
                      send_only: int = 0, config: Any = None, stream: Any = None) -> None:
        """Returns results to their home ranks and sums them; arguments as in `ncclEpDispatch`."""
        self._call("ncclEpCombine", handle, _tensors(inputs), num_inputs, _tensors(outputs),
                   num_outputs, _tensors(local_tensors), num_local_tensors, int(send_only), None,
                   stream)

    def ncclEpComplete(self, handle: Any, config: Any = None, stream: Any = None) -> None:
        """Receives what the handle's staged operation has sent; does nothing if there is none."""
        self._call("ncclEpComplete", handle, None, stream)


def tensor_list(tensors: Sequence[Any]) -> tuple[Any, int]:
    """A C array of pointers to `tensors`, which it keeps alive, and its length."""
    pointer = ctypes.POINTER(ncclNDTensor_t)
    for each in tensors:
        if not isinstance(each, (pointer, ncclNDTensor_t)):
            raise TypeError(f"must be an ncclNDTensor_t, not {type(each).__name__}; EpGroup and "
                            "EpHandle take torch tensors")
    pointers = [each if isinstance(each, pointer) else ctypes.pointer(each) for each in tensors]
    return (pointer * len(pointers))(*pointers), len(pointers)


def _load(path: str) -> tuple[ctypes.CDLL, ctypes.CDLL, dict[str, Any]]:
    """libnccl_ep, its NCCL, and the functions of both."""
    try:
        if "libnccl_ep" in os.path.basename(path):
            base = library_search.load_nccl(path)
            library = ctypes.CDLL(path)
            library_search.require_first_generation(library, path)
        else:
            base = library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise RuntimeError(f"{path} cannot be loaded: {error}") from error
    table: dict[str, Any] = {}
    for function in functions.BASE_FUNCTIONS:
        if not function.bind(table, base):
            raise RuntimeError(f"the NCCL that goes with {path} has no {function.name}")
    for function in (*functions.EP_FUNCTIONS, *functions.EXTRA_FUNCTIONS):
        function.bind(table, library)
    return library, base, table


def _pointer(argument: Any) -> Any:
    """A pointer to a structure; a pointer, byref() or None unchanged."""
    return ctypes.byref(argument) if isinstance(argument, ctypes.Structure) else argument


def _tensors(argument: Any) -> Any:
    """A list or tuple of tensors as an array of pointers; such an array unchanged."""
    return tensor_list(argument)[0] if isinstance(argument, (list, tuple)) else argument


def _address(argument: Any) -> Any:
    return argument.data_ptr() if hasattr(argument, "data_ptr") else argument
