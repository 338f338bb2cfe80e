//! The types of the C interface, exactly as they lie in memory (x86-64 and AArch64 Linux).
//!
//! cbindgen turns this file and the exported functions into `include/nccl_ep.h`, so the comments here are the
//! documentation that C programmers read. Enums that a caller passes in are of `raw`.
#![allow(non_camel_case_types)] // C names, as the ABI dictates.

use std::ffi::{c_int, c_uint, c_ulong, c_void};

nccl_ep_abi::raw!(ncclEpAlgorithm_t, ncclEpTensorFlags_t, ncclEpTensorTag_t);

/// NCCL's result type; see `nccl.h`.
pub type ncclResult_t = c_int;
/// Of a call that has not ended.
pub(crate) const IN_PROGRESS: ncclResult_t = 7;
/// NCCL's element type; see `nccl.h`.
pub type ncclDataType_t = c_uint;
/// NCCL's communicator; see `nccl.h`.
pub type ncclComm_t = *mut c_void;
/// The CUDA runtime's stream; see `cuda_runtime.h`.
pub type cudaStream_t = *mut c_void;
/// The CUDA runtime's error type; see `cuda_runtime.h`.
pub type cudaError_t = c_int;

/// The version of this header. `ncclEpGetVersion` gets that of the library.
pub const NCCL_EP_MAJOR: c_int = 0;
/// See `NCCL_EP_MAJOR`.
pub const NCCL_EP_MINOR: c_int = 1;
/// See `NCCL_EP_MAJOR`.
pub const NCCL_EP_PATCH: c_int = 0;

/// The library has `ncclEpGetVersion`; others with this interface may lack it.
pub const NCCL_EP_HAS_GET_VERSION: c_int = 1;
/// The library has `ncclEpGetLastError`.
pub const NCCL_EP_HAS_GET_LAST_ERROR: c_int = 1;
/// The library has `ncclEpGetAsyncError`.
pub const NCCL_EP_HAS_GET_ASYNC_ERROR: c_int = 1;
/// The library has `ncclEpSetChoice` and `ncclEpSetSelector`.
pub const NCCL_EP_HAS_CHOICES: c_int = 1;
/// The library has `ncclEpGroupCountRows`.
pub const NCCL_EP_HAS_GROUP_COUNT_ROWS: c_int = 1;
/// The library has `ncclEpGroupTimeWaits`.
pub const NCCL_EP_HAS_GROUP_TIME_WAITS: c_int = 1;
/// The library has `ncclEpGroupTimeCombineWaits`.
pub const NCCL_EP_HAS_GROUP_TIME_COMBINE_WAITS: c_int = 1;
/// The library has `ncclEpMemAlloc` and the other functions for memory that peers map.
pub const NCCL_EP_HAS_MEM: c_int = 1;
/// The library has `ncclEpHandleWaitNumRecvTokens`.
pub const NCCL_EP_HAS_HANDLE_WAIT_NUM_RECV_TOKENS: c_int = 1;
/// The library has `ncclEpHandleOpen` and `ncclEpHandleUpdate`.
pub const NCCL_EP_HAS_HANDLE_UPDATE: c_int = 1;
/// The library has `ncclEpHandleOpenBounded`.
pub const NCCL_EP_HAS_HANDLE_OPEN_BOUNDED: c_int = 1;

/// Lets the library choose a value.
pub const NCCL_EP_AUTO: c_int = 0;

/// How a group moves tokens.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclEpAlgorithm_t {
    /// Low latency (LL): few tokens, 3-D output by expert or by source rank, staged operations.
    NCCL_EP_ALGO_LOW_LATENCY = 0,
    /// High throughput (HT): many tokens, 2-D output, routing exchanged when a handle is created or updated.
    NCCL_EP_ALGO_HIGH_THROUGHPUT = 1,
}

/// Tensor flags; none are defined yet.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclEpTensorFlags_t {
    /// No flags.
    NCCL_EP_TENSOR_FLAG_NONE = 0,
}

/// The role of a tensor in a call. Calls find tensors by tag, in lists of any order. They ignore tensors with tags that
/// they do not use, but still refuse bad sizes or strides in them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclEpTensorTag_t {
    /// No meaning.
    NCCL_EP_TENSOR_TAG_NONE = 0,
    /// Token rows: any type in a dispatch; bfloat16, float16 or float32 in a combine. A row is a multiple of 16 bytes.
    NCCL_EP_TENSOR_TAG_TOKENS = 1,
    /// Top-k expert ids: int64; for `ncclEpHandleUpdate` also int32.
    NCCL_EP_TENSOR_TAG_TOPK_IDX = 2,
    /// Top-k weights: float32.
    NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS = 3,
    /// Scales of token rows, in dispatches: any type of 1, 2 or 4 bytes, or made by a cast.
    NCCL_EP_TENSOR_TAG_SCALES = 4,
    /// Received tokens per local expert, in device memory: int32 `[L]`. LL rank-major: per source rank, `[R]`.
    NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE = 5,
    /// Received tokens per local expert, in mapped pinned host memory: int32 `[L]`.
    NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_HOST = 6,
    /// Declared for source compatibility; no call reads it.
    NCCL_EP_TENSOR_TAG_TOKENS_PER_EXPERTS = 7,
}

/// A tensor: dense and row-major, except for scales. Made by `ncclEpTensorCreate`, or filled in by the caller.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclNDTensor_t {
    /// Not read. 1 by convention.
    pub version: c_uint,
    /// Number of dimensions, 1 to 5.
    pub ndim: c_uint,
    /// Extents, slowest dimension first: host array of `ndim`.
    pub sizes: *mut c_uint,
    /// Host array of `ndim`: NULL, all ones, or row-major strides in elements; all three mean "dense". Scales may have
    /// other strides: see `ncclEpDispatch`.
    pub strides: *mut c_uint,
    /// Element type.
    pub datatype: ncclDataType_t,
    /// Device pointer; for `RECV_EXPERT_COUNTER_HOST` a mapped pinned host pointer.
    pub data: *mut c_void,
    /// An `ncclEpTensorTag_t`.
    pub tag: c_uint,
    /// Not read.
    pub flags: raw::ncclEpTensorFlags_t,
}

/// Configuration of a group; the same on every rank.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpGroupConfig_t {
    /// Must be 1.
    pub version: c_uint,
    /// LL or HT.
    pub algorithm: raw::ncclEpAlgorithm_t,
    /// Experts over all ranks, E: a positive multiple of the number of ranks R. Expert `g` lives on rank `g / L` as
    /// local expert `g % L`, where L = E / R.
    pub num_experts: c_uint,
    /// Most tokens of one rank, M. `NCCL_EP_AUTO` (HT only): each handle determines its own bound.
    pub max_tokens_per_rank: c_uint,
    /// Largest token row in bytes: hidden size times element size, a multiple of 16.
    pub token_size_bytes: c_uint,
    /// Bytes of network buffers, or `NCCL_EP_AUTO`. Not read: the library determines what it needs.
    pub rdma_buffer_size: c_ulong,
    /// Queue pairs per rank, or `NCCL_EP_AUTO`. Not read: NCCL manages them.
    pub num_qp_per_rank: c_uint,
    /// Most SMs that a kernel takes, in channels of 2 SMs each, or `NCCL_EP_AUTO`. Set it if your own collectives run
    /// beside LL on one node, on other streams: otherwise an LL kernel there may take every SM while it waits for other
    /// ranks.
    pub num_channels: c_uint,
}

/// Options of a dispatch.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpDispatchConfig_t {
    /// If not 0, a cast rounds its float32 scales up to powers of two. Must be 0 if scales are forwarded; no effect
    /// without scales.
    pub round_scales: c_uint,
}

/// Options of a combine: none are defined yet. Pass NULL or a zeroed object.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpCombineConfig_t {
    /// Not read.
    pub reserved: c_uint,
}

/// Options of a completion: none are defined yet. Pass NULL or a zeroed object.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpCompleteConfig_t {
    /// Not read.
    pub reserved: c_uint,
}

/// A group of ranks that exchange tokens.
pub struct ncclEpGroup {
    _private: [u8; 0],
}
/// Names a group.
pub type ncclEpGroup_t = *mut ncclEpGroup;

/// One routing of tokens to experts.
pub struct ncclEpHandle {
    _private: [u8; 0],
}
/// Names a handle.
pub type ncclEpHandle_t = *mut ncclEpHandle;

/// Options of a handle: none are defined.
pub struct ncclEpHandleConfig {
    _private: [u8; 0],
}
/// Options of a handle. Pass NULL for a pointer to this type.
pub type ncclEpHandleConfig_t = *mut ncclEpHandleConfig;

/// An operation for which a choice can be made.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclEpOperation_t {
    /// `ncclEpDispatch` in LL.
    NCCL_EP_OPERATION_LL_DISPATCH = 1,
    /// `ncclEpCombine` in LL.
    NCCL_EP_OPERATION_LL_COMBINE = 2,
    /// `ncclEpDispatch` in HT.
    NCCL_EP_OPERATION_HT_DISPATCH = 3,
    /// `ncclEpCombine` in HT.
    NCCL_EP_OPERATION_HT_COMBINE = 4,
}

/// A way to run an operation.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclEpVariant_t {
    /// The library's own choice.
    NCCL_EP_VARIANT_AUTO = 0,
    /// "ll.reduce", for LL combines: as with NCCL_EP_LL_COMBINE=reduce. No effect on rank-major rows.
    NCCL_EP_VARIANT_LL_REDUCE = 1,
    /// "ll.exact", for LL combines: as with NCCL_EP_LL_COMBINE=exact. On one node only, and only if K is at most R or
    /// the group was created with NCCL_EP_LL_COMBINE=exact. No effect on rank-major rows.
    NCCL_EP_VARIANT_LL_EXACT = 2,
    /// "ht.ring", for both HT operations: rows pass through the library's buffers.
    NCCL_EP_VARIANT_HT_RING = 3,
    /// "ht.direct", for HT dispatches: rows are stored straight into outputs that peers map. On one node only, and only
    /// if all ranks have such outputs.
    NCCL_EP_VARIANT_HT_DIRECT = 4,
    /// "ht.pull", for HT combines: rows are loaded straight from inputs that peers map. On one node only, and only if
    /// all ranks have such inputs.
    NCCL_EP_VARIANT_HT_PULL = 5,
}

/// What a selector is told about an operation.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpQuery_t {
    /// Bytes of this structure; later versions may have more at its end.
    pub size: c_uint,
    /// An `ncclEpOperation_t`.
    pub operation: c_uint,
    /// This rank's tokens, T.
    pub tokens: c_uint,
    /// K.
    pub top_k: c_uint,
    /// Bytes of a row as it travels, without scales.
    pub row_bytes: c_uint,
    /// R.
    pub ranks: c_uint,
    /// Most SMs that the operation may take, one per block; 0 on the CPU, where nothing bounds it.
    pub sms: c_uint,
    /// Not 0 if peers map the TOKENS that a dispatch delivers or a combine takes: memory of `ncclEpMemAlloc` or
    /// `ncclEpMemRegister`.
    pub symmetric: c_uint,
}

/// How to run an operation. A field that is 0 leaves it to the library.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct ncclEpChoice_t {
    /// Bytes of this structure.
    pub size: c_uint,
    /// An `ncclEpVariant_t`.
    pub variant: c_uint,
    /// Blocks of the kernel, one per SM: within the bounds of the group and of its GPU.
    pub blocks: c_uint,
    /// How many of them send: at most `blocks`. In LL, if both are equal, every block does everything.
    pub send_blocks: c_uint,
    /// Threads per block: a multiple of 32, up to 1024. A kernel with a lower limit uses that.
    pub threads: c_uint,
    /// If not 0, the kernel is not launched while the one before it on its stream runs. LL kernels on one node
    /// otherwise are.
    pub in_order: c_uint,
}

/// Chooses how to run an operation. Writes to `choice`, whose fields are 0 except for its size, and returns not 0; or
/// returns 0 to choose nothing.
pub type ncclEpSelect_t =
    Option<unsafe extern "C" fn(user: *mut c_void, query: *const ncclEpQuery_t, choice: *mut ncclEpChoice_t) -> c_int>;

/// What `ncclEpMemInfo` reports. Later versions may have more fields at the end.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpMemInfo_t {
    /// Bytes of the structure, set by the caller.
    pub size: usize,
    /// The object's number, 0 to 63, the same on all ranks. Numbers of freed objects are reused.
    pub object: c_uint,
    /// How many other ranks map this rank's memory of the object, and this rank theirs: those of its node.
    pub peers: c_uint,
    /// Offset of the given address in this rank's memory of the object.
    pub offset: usize,
    /// Bytes of this rank's memory of the object.
    pub bytes: usize,
    /// Host array of R addresses: where this rank sees each rank's memory of the object. NULL for ranks of other nodes.
    /// Valid as long as the object.
    pub peer_data: *const *mut c_void,
    /// How many tensors of operations lay in the object.
    pub tensors: c_ulong,
    /// How many tensors of the group's operations lay in no object while the group had one; their rows are copied as
    /// usual. Counts only tensors that an object could have served: in HT, rows that a dispatch delivers or a combine
    /// takes.
    pub plain_tensors: c_ulong,
    /// On GPUs: how many HT operations of the group passed rows through the library's buffers although their tensor lay
    /// in memory that peers map, because another rank's did not. A `size` of 56 bytes has no such field.
    pub fallbacks: c_ulong,
}

/// Allocates `bytes` of device memory, as `cudaMalloc` does. Returns `cudaSuccess` (0) on success.
pub type ncclEpAllocFn_t = Option<unsafe extern "C" fn(ptr: *mut *mut c_void, bytes: usize) -> cudaError_t>;
/// Frees memory from the matching allocator, as `cudaFree` does. Returns `cudaSuccess` (0) on success.
pub type ncclEpFreeFn_t = Option<unsafe extern "C" fn(ptr: *mut c_void) -> cudaError_t>;
