//! The types of the C interface, exactly as they lie in memory (x86-64 and AArch64 Linux).
//!
//! cbindgen turns this file, `enums` and the exported functions into the headers, so the comments here are the
//! documentation that C programmers read. Enums that a caller passes in are of `raw`.
#![allow(non_camel_case_types)] // C names, as the ABI dictates.

use std::ffi::{c_int, c_uint, c_ulong, c_void};

nccl_ep_abi::raw!(
    ncclEpAlgorithm_t,
    ncclEpCombQuant_t,
    ncclEpDispQuant_t,
    ncclEpExpertIdKind_t,
    ncclEpLayout_t,
    ncclEpOverflowPolicy_t,
    ncclEpPassDir_t,
    ncclEpZeroCopyMode_t
);

/// NCCL's result type; see `nccl.h`.
pub type ncclResult_t = c_int;
/// NCCL's element type; see `nccl.h`.
pub type ncclDataType_t = c_uint;
/// NCCL's communicator; see `nccl.h`.
pub type ncclComm_t = *mut c_void;
/// NCCL's window; see `nccl.h`.
pub type ncclWindow_t = *mut c_void;
/// The CUDA runtime's stream; see `cuda_runtime.h`.
pub type cudaStream_t = *mut c_void;
/// The CUDA runtime's error type; see `cuda_runtime.h`.
pub type cudaError_t = c_int;

/// The version of this interface. `ncclEpGetVersion` gets that of the library.
pub const NCCL_EP_MAJOR: c_int = 0;
/// See `NCCL_EP_MAJOR`.
pub const NCCL_EP_MINOR: c_int = 2;
/// See `NCCL_EP_MAJOR`.
pub const NCCL_EP_PATCH: c_int = 0;
/// MAJOR * 10000 + MINOR * 100 + PATCH.
pub const NCCL_EP_VERSION_CODE: c_int = 200;
/// The generation of the structs.
pub const NCCL_EP_API_VERSION: c_int = 3;
/// Lets the library choose a value.
pub const NCCL_EP_AUTO: c_int = 0;
/// How the rows of a dispatch travel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclEpDispQuant_t {
    /// Unchanged.
    NCCL_EP_DISP_QUANT_NONE = 0,
    /// Unchanged, with the caller's scales.
    NCCL_EP_DISP_QUANT_FWD = 1,
    /// LL: the dispatch casts bfloat16 to float8e4m3 and makes scales.
    NCCL_EP_DISP_QUANT_DS_FP8E3M4 = 2,
}

/// How the rows of a combine travel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclEpCombQuant_t {
    /// Unchanged.
    NCCL_EP_COMB_QUANT_NONE = 0,
    /// LL. Not served.
    NCCL_EP_COMB_QUANT_NVFP4 = 1,
    /// HT expert-major. Not served.
    NCCL_EP_COMB_QUANT_MXFP8 = 2,
}

/// A tensor, dense and row-major. Copied at each call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpTensor {
    /// Bytes of this struct.
    pub size: c_uint,
    /// `NCCL_EP_TENSOR_MAGIC`.
    pub magic: c_uint,
    /// Number of dimensions, 1 to 5.
    pub ndim: c_uint,
    /// Element type.
    pub datatype: ncclDataType_t,
    /// Address in device memory, or of mapped host memory; NULL only if an extent is 0, or with a window.
    pub data: *mut c_void,
    /// Window of the group's communicator that has the data, if `data` is NULL; with NCCL 2.29 or newer.
    pub win_hdl: ncclWindow_t,
    /// Where in the window.
    pub win_offset: u64,
    /// Extents, slowest first: host array of `ndim`.
    pub sizes: *mut usize,
}
/// A tensor.
pub type ncclEpTensor_t = ncclEpTensor;

/// Options of `ncclEpTensorAlloc`: none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpTensorAllocConfig_t {
    /// Bytes of this struct.
    pub size: c_uint,
    /// `NCCL_EP_MAGIC`.
    pub magic: c_uint,
}

/// Allocates `bytes` of device memory and stores the address in `*ptr`.
pub type ncclEpAllocFn_t =
    Option<unsafe extern "C" fn(ptr: *mut *mut c_void, bytes: usize, context: *mut c_void) -> cudaError_t>;
/// Frees memory of an `ncclEpAllocFn_t`.
pub type ncclEpFreeFn_t = Option<unsafe extern "C" fn(ptr: *mut c_void, context: *mut c_void) -> cudaError_t>;

/// A caller's allocator: both functions or none. It allocates for handles without memory of the caller's
/// (`ncclEpInitHandle` without `handle_mem`, `ncclEpCreateHandle`), at multiples of 16 bytes, as many pieces as there
/// are handles at a time. `ncclEpCreateHandle` and `ncclEpUpdateHandle` call `alloc_fn`. `ncclEpGroupDestroy`, unless
/// it fails, calls `free_fn` for all pieces. Both are called with the group's device current and, during a capture,
/// with the thread in relaxed mode; they must not call the library. The CPU stand-ins call neither.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpAllocConfig_t {
    /// Allocates.
    pub alloc_fn: ncclEpAllocFn_t,
    /// Frees memory of `alloc_fn`.
    pub free_fn: ncclEpFreeFn_t,
    /// Passed to both.
    pub context: *mut c_void,
}

/// Configuration of a group; the same on every rank. Ranks compare `algorithm`, `num_experts`,
/// `max_dispatch_tokens_per_rank`, `max_token_bytes` and, in HT, `max_recv_tokens_per_rank` and whether
/// `overflow_policy` drops rows; nothing else.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpGroupConfig_t {
    /// Bytes of this struct.
    pub size: c_uint,
    /// `NCCL_EP_MAGIC`.
    pub magic: c_uint,
    /// `NCCL_EP_API_VERSION`. Not read: `size` tells which fields there are.
    pub version: c_uint,
    /// LL or HT.
    pub algorithm: raw::ncclEpAlgorithm_t,
    /// Experts over all ranks, E: a positive multiple of the number of ranks R. Expert `g` lives on rank `g / L` as
    /// local expert `g % L`, where L = E / R.
    pub num_experts: c_uint,
    /// Most tokens of one rank, M.
    pub max_dispatch_tokens_per_rank: c_uint,
    /// HT: most rows (expert-major: slots) that one rank receives, B, at least M. `NCCL_EP_AUTO`: as many as come,
    /// which each dispatch waits to learn. LL: not read.
    pub max_recv_tokens_per_rank: c_uint,
    /// Most bytes of a token's row and its scales together; HT: a multiple of 16.
    pub max_token_bytes: c_uint,
    /// Not read: the library determines what it needs.
    pub rdma_buffer_size: c_ulong,
    /// Not read.
    pub num_qp_per_rank: c_uint,
    /// Not read.
    pub num_channels: c_uint,
    /// Most SMs of an operation, up to those of the device, or `NCCL_EP_AUTO`. Dispatches and combines both get the
    /// larger of their two budgets. NCCL_EP_COMM_SMS overrides all three budgets.
    pub max_num_sms: c_uint,
    /// Allocates for handles without memory of the caller's. None: the library does.
    pub alloc: ncclEpAllocConfig_t,
    /// LL: not 0 masks lost ranks. Not served yet. HT: without effect.
    pub enable_mask: c_uint,
    /// How long an operation waits for another rank; 0: 100 seconds. NCCL_EP_TIMEOUT_MS overrides it.
    pub timeout_ns: u64,
    /// Whether tensors are in windows. Any value works, as memory outside of windows serves as well.
    pub zero_copy: raw::ncclEpZeroCopyMode_t,
    /// HT: what happens to rows (expert-major: slots) beyond `max_recv_tokens_per_rank`.
    pub overflow_policy: raw::ncclEpOverflowPolicy_t,
    /// HT: largest K of a handle, at most E. 0: any, but expert-major handles then need `max_recv_tokens_per_rank`.
    pub num_topk: c_uint,
    /// Not read.
    pub padding_v2: [u8; 4],
    /// For dispatches, instead of `max_num_sms`; 0: that one. NCCL_EP_DISPATCH_SMS overrides both.
    pub dispatch_num_sms: c_uint,
    /// For combines, instead of `max_num_sms`; 0: that one. NCCL_EP_COMBINE_SMS overrides both.
    pub combine_num_sms: c_uint,
}

/// What a rank learns about the rows that it receives. Each tensor may be NULL unless stated otherwise.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpLayoutInfo_t {
    /// Bytes of this struct.
    pub size: c_uint,
    /// `NCCL_EP_MAGIC`.
    pub magic: c_uint,
    /// By local expert, `[L]` or longer. LL expert-major: received rows, int32; required by a dispatch. LL rank-major:
    /// must be NULL. HT, int32 or int64, in an update: received rows (flat) or lengths of zones (expert-major, also in
    /// a forward dispatch).
    pub expert_counters: *mut ncclEpTensor_t,
    /// LL rank-major: received rows by source rank, int32 `[R]` or longer; may be NULL. LL expert-major: must be NULL.
    /// HT: not read.
    pub src_rank_counters: *mut ncclEpTensor_t,
    /// HT expert-major: where each zone begins, given as `expert_counters`. Elsewhere not read.
    pub expert_offsets: *mut ncclEpTensor_t,
    /// HT: number of all rows (expert-major: slots), including dropped ones; int32 or int64 `[1]`. May be given
    /// wherever `expert_counters` may. LL: not read.
    pub recv_total_counter: *mut ncclEpTensor_t,
    /// How received ids are numbered; read by a dispatch.
    pub recv_topk_idx_kind: raw::ncclEpExpertIdKind_t,
    /// Not read.
    pub padding_v2: [u8; 4],
}

/// What a dispatch reads.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpDispatchInputs_t {
    /// Bytes of this struct.
    pub size: c_uint,
    /// `NCCL_EP_MAGIC`.
    pub magic: c_uint,
    /// `[T, H]`: required.
    pub tokens: *mut ncclEpTensor_t,
    /// float32 `[T, K]`: required by LL rank-major and in HT forward, else NULL.
    pub topk_weights: *mut ncclEpTensor_t,
    /// Scales `[T, S]` of the tokens: required by `NCCL_EP_DISP_QUANT_FWD`, else NULL.
    pub scales: *mut ncclEpTensor_t,
}

/// What a dispatch writes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpDispatchOutputs_t {
    /// Bytes of this struct.
    pub size: c_uint,
    /// `NCCL_EP_MAGIC`.
    pub magic: c_uint,
    /// Received rows: required.
    pub tokens: *mut ncclEpTensor_t,
    /// Their weights: required where the inputs have some, else NULL.
    pub topk_weights: *mut ncclEpTensor_t,
    /// Their scales: required by both recipes, else NULL.
    pub scales: *mut ncclEpTensor_t,
    /// Their ids: required by LL rank-major and HT flat forward, else NULL.
    pub topk_idx: *mut ncclEpTensor_t,
}

/// What a combine reads.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpCombineInputs_t {
    /// Bytes of this struct.
    pub size: c_uint,
    /// `NCCL_EP_MAGIC`.
    pub magic: c_uint,
    /// Rows of the experts: required.
    pub tokens: *mut ncclEpTensor_t,
    /// HT backward: float32 gradients of received weights, required. HT forward: must be NULL. LL: not read.
    pub topk_weights: *mut ncclEpTensor_t,
    /// Must be NULL.
    pub scales: *mut ncclEpTensor_t,
}

/// What a combine writes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpCombineOutputs_t {
    /// Bytes of this struct.
    pub size: c_uint,
    /// `NCCL_EP_MAGIC`.
    pub magic: c_uint,
    /// `[T, H]`: required.
    pub tokens: *mut ncclEpTensor_t,
    /// float32 `[T, K]`. LL expert-major: the weights of the sums, which are read. HT backward: gets gradients.
    /// Elsewhere not read.
    pub topk_weights: *mut ncclEpTensor_t,
}

/// Options of a handle.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpHandleConfig_t {
    /// Bytes of this struct.
    pub size: c_uint,
    /// `NCCL_EP_MAGIC`.
    pub magic: c_uint,
    /// HT expert-major: the length of each zone is a multiple of this many rows. 0, 1 or a power of two, small enough
    /// that the slots that may come to a rank number less than 2^31. Elsewhere not read.
    pub dispatch_output_per_expert_alignment: usize,
}

/// Options of a dispatch.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpDispatchConfig_t {
    /// Bytes of this struct.
    pub size: c_uint,
    /// `NCCL_EP_MAGIC`.
    pub magic: c_uint,
    /// LL: if not 0, only send now; `ncclEpComplete` receives. HT: no effect.
    pub send_only: c_uint,
    /// Not 0: a cast's scales are powers of two. Must be 0 with `NCCL_EP_DISP_QUANT_FWD`.
    pub round_scales: c_uint,
    /// The pass; LL has no backward one.
    pub pass_direction: raw::ncclEpPassDir_t,
    /// How rows travel.
    pub quant_recipe: raw::ncclEpDispQuant_t,
}

/// Options of a combine.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpCombineConfig_t {
    /// Bytes of this struct.
    pub size: c_uint,
    /// `NCCL_EP_MAGIC`.
    pub magic: c_uint,
    /// LL: if not 0, only send now; `ncclEpComplete` receives. HT: no effect.
    pub send_only: c_uint,
    /// The pass; LL has no backward one.
    pub pass_direction: raw::ncclEpPassDir_t,
    /// Only `NCCL_EP_COMB_QUANT_NONE` is served.
    pub quant_recipe: raw::ncclEpCombQuant_t,
}

/// Options of a completion: none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclEpCompleteConfig_t {
    /// Bytes of this struct.
    pub size: c_uint,
    /// `NCCL_EP_MAGIC`.
    pub magic: c_uint,
}

/// A group of ranks that exchange tokens.
pub struct ncclEpGroup {
    _private: [u8; 0],
}
/// Names a group.
pub type ncclEpGroup_t = *mut ncclEpGroup;

/// A routing of tokens to experts.
pub struct ncclEpHandle {
    _private: [u8; 0],
}
/// Names a handle.
pub type ncclEpHandle_t = *mut ncclEpHandle;
