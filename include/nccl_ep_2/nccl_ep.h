// NCCL EP: expert-parallel dispatch and combine for Mixture-of-Experts models. The later interface, of libnccl_ep.so.0.
//
// Generated from the library's sources by `make header`; do not edit.
//
// Notation: R ranks; E experts, L = E / R of them on each rank; M max_dispatch_tokens_per_rank; T tokens of this
// rank; K top-k; H hidden size.
//
// Every function returns ncclSuccess, or an error code; with NCCL_DEBUG=WARN a line tells why.
// Outputs are written on success only. Nothing exits, asserts or throws. What is said not to be served yet is refused
// with ncclInvalidUsage.
//
// Each struct begins with its size and a magic number: NCCL_EP_..._INIT sets both and the rest to zero, which is the
// default everywhere. Programs of earlier generations pass shorter structs, those of later ones longer ones.
//
// A process that was forked after a group had been made cannot use the library: there functions that
// destroy something do nothing, and all others return ncclInvalidUsage at once.

#pragma once

#include <stddef.h>
#include <stdint.h>
#include <cuda.h>
#include <nccl.h>
#include "nccl_ep/ep_enums.h"

// The `magic` of every struct but tensors, and of a tensor that a program has made.
#define NCCL_EP_MAGIC 0xC00FFFEEu
#define NCCL_EP_TENSOR_MAGIC 0xCAFECAFEu

// A type of later NCCLs: two float4e2m1 in a byte.
#ifndef ncclFloat4x2
#define ncclFloat4x2 ((ncclDataType_t)12)
#endif

// The version of this interface; `ncclEpGetVersion` gives that of the library.
#define NCCL_EP_MAJOR 0

// See `NCCL_EP_MAJOR`.
#define NCCL_EP_MINOR 2

// See `NCCL_EP_MAJOR`.
#define NCCL_EP_PATCH 0

// MAJOR * 10000 + MINOR * 100 + PATCH.
#define NCCL_EP_VERSION_CODE 200

// The generation of the structs.
#define NCCL_EP_API_VERSION 3

// Let the library choose a value.
#define NCCL_EP_AUTO 0

// How the rows of a dispatch travel.
typedef enum ncclEpDispQuant_t {
  // As they are.
  NCCL_EP_DISP_QUANT_NONE = 0,
  // As they are, with the caller's scales.
  NCCL_EP_DISP_QUANT_FWD = 1,
  // LL: the dispatch casts bfloat16 to float8e4m3 and makes scales.
  NCCL_EP_DISP_QUANT_DS_FP8E3M4 = 2,
} ncclEpDispQuant_t;

// How the rows of a combine travel.
typedef enum ncclEpCombQuant_t {
  // As they are.
  NCCL_EP_COMB_QUANT_NONE = 0,
  // LL. Not served.
  NCCL_EP_COMB_QUANT_NVFP4 = 1,
  // HT. Not served.
  NCCL_EP_COMB_QUANT_MXFP8 = 2,
} ncclEpCombQuant_t;

// A group of ranks that exchange tokens.
typedef struct ncclEpGroup ncclEpGroup;

// A routing of tokens to experts.
typedef struct ncclEpHandle ncclEpHandle;

// Names a group.
typedef struct ncclEpGroup *ncclEpGroup_t;

// Allocates `bytes` of device memory, to whose address it sets `*ptr`.
typedef cudaError_t (*ncclEpAllocFn_t)(void **ptr, size_t bytes, void *context);

// Frees what an `ncclEpAllocFn_t` gave.
typedef cudaError_t (*ncclEpFreeFn_t)(void *ptr, void *context);

// A caller's allocator: both functions or none. It gives the memory of handles that have none of the program's
// (`ncclEpInitHandle` without `handle_mem`, `ncclEpCreateHandle`), at multiples of 16 bytes, as many pieces as there
// are handles at a time: `alloc_fn` is called in `ncclEpCreateHandle` and `ncclEpUpdateHandle`, `free_fn` for all
// pieces in `ncclEpGroupDestroy`, unless that fails. Both are called with the group's device current and, in a
// capture, in the thread's relaxed mode; they may not call the library.
typedef struct ncclEpAllocConfig_t {
  // Allocates.
  ncclEpAllocFn_t alloc_fn;
  // Frees what `alloc_fn` gave.
  ncclEpFreeFn_t free_fn;
  // Passed to both.
  void *context;
} ncclEpAllocConfig_t;

// Configuration of a group; the same on every rank.
typedef struct ncclEpGroupConfig_t {
  // Bytes of this struct.
  unsigned int size;
  // `NCCL_EP_MAGIC`.
  unsigned int magic;
  // `NCCL_EP_API_VERSION`. Not read: `size` says what there is.
  unsigned int version;
  // LL or HT.
  ncclEpAlgorithm_t algorithm;
  // Experts over all ranks, E: a positive multiple of the number of ranks R. Expert `g` lives on
  // rank `g / L` as local expert `g % L`, where L = E / R.
  unsigned int num_experts;
  // Most tokens of one rank, M.
  unsigned int max_dispatch_tokens_per_rank;
  // HT: most rows, expert-major slots, that one rank receives, B, at least M. `NCCL_EP_AUTO`: as many as
  // come, which a dispatch waits to know. LL: not read.
  unsigned int max_recv_tokens_per_rank;
  // Most bytes of a token's row and its scales together; HT: a multiple of 16.
  unsigned int max_token_bytes;
  // Not read: the library finds what it needs.
  unsigned long rdma_buffer_size;
  // Not read.
  unsigned int num_qp_per_rank;
  // Not read.
  unsigned int num_channels;
  // Most SMs of an operation, or `NCCL_EP_AUTO`; at most those of the device. Dispatches and combines both have the
  // larger of their budgets. NCCL_EP_COMM_SMS goes before all three.
  unsigned int max_num_sms;
  // Gives the memory of handles that have none of the program's; none: the library does.
  struct ncclEpAllocConfig_t alloc;
  // Not 0 in LL: lost ranks are masked. Not served yet.
  unsigned int enable_mask;
  // How long an operation waits for another rank; NCCL_EP_TIMEOUT_MS has priority. 0: 100 seconds.
  uint64_t timeout_ns;
  // Whether tensors are in windows. Any value is fine, since memory that is in none serves as well.
  ncclEpZeroCopyMode_t zero_copy;
  // HT: what happens to rows, expert-major slots, beyond `max_recv_tokens_per_rank`.
  ncclEpOverflowPolicy_t overflow_policy;
  // HT: largest K of a handle, at most E; 0: any, but not expert-major without `max_recv_tokens_per_rank`.
  unsigned int num_topk;
  // Not read.
  uint8_t padding_v2[4];
  // For dispatches instead of `max_num_sms`; 0: that. NCCL_EP_DISPATCH_SMS goes before both.
  unsigned int dispatch_num_sms;
  // For combines instead of `max_num_sms`; 0: that. NCCL_EP_COMBINE_SMS goes before both.
  unsigned int combine_num_sms;
} ncclEpGroupConfig_t;

// A tensor, dense and row-major. Copied at each call.
typedef struct ncclEpTensor {
  // Bytes of this struct.
  unsigned int size;
  // `NCCL_EP_TENSOR_MAGIC`.
  unsigned int magic;
  // Number of dimensions, 1 to 5.
  unsigned int ndim;
  // Element type.
  ncclDataType_t datatype;
  // Address in device memory, or of mapped host memory; NULL only if an extent is 0, or with a window.
  void *data;
  // Window of the group's communicator that has the data, if `data` is NULL; with NCCL 2.29 or newer.
  ncclWindow_t win_hdl;
  // Where in the window.
  uint64_t win_offset;
  // Extents, slowest first: host array of `ndim`.
  size_t *sizes;
} ncclEpTensor;

// A tensor.
typedef struct ncclEpTensor ncclEpTensor_t;

// Options of `ncclEpTensorAlloc`: none.
typedef struct ncclEpTensorAllocConfig_t {
  // Bytes of this struct.
  unsigned int size;
  // `NCCL_EP_MAGIC`.
  unsigned int magic;
} ncclEpTensorAllocConfig_t;

// Options of a handle.
typedef struct ncclEpHandleConfig_t {
  // Bytes of this struct.
  unsigned int size;
  // `NCCL_EP_MAGIC`.
  unsigned int magic;
  // HT expert-major: zones are multiples of so many rows; 0, 1 or a power of two, so small that what may
  // come to a rank is countable in 31 bits. Elsewhere not read.
  size_t dispatch_output_per_expert_alignment;
} ncclEpHandleConfig_t;

// Names a handle.
typedef struct ncclEpHandle *ncclEpHandle_t;

// What a rank learns of the rows that it receives; each tensor may be NULL, unless it is said otherwise.
typedef struct ncclEpLayoutInfo_t {
  // Bytes of this struct.
  unsigned int size;
  // `NCCL_EP_MAGIC`.
  unsigned int magic;
  // By local expert: `[L]` or longer. LL expert-major: received rows, int32; a dispatch requires it. LL rank-major:
  // must be NULL. HT: of an update, int32 or int64: flat, received rows; expert-major, lengths of zones, also of a
  // forward dispatch.
  ncclEpTensor_t *expert_counters;
  // LL rank-major: received rows by source rank, int32 `[R]` or longer; may be NULL. LL expert-major: must be NULL.
  // HT: not read.
  ncclEpTensor_t *src_rank_counters;
  // HT expert-major: where zones begin, as `expert_counters`. Elsewhere not read.
  ncclEpTensor_t *expert_offsets;
  // HT: all rows, expert-major all slots, dropped ones among them; int32 or int64 `[1]`, wherever `expert_counters`
  // are. LL: not read.
  ncclEpTensor_t *recv_total_counter;
  // How received ids count; a dispatch reads it.
  ncclEpExpertIdKind_t recv_topk_idx_kind;
  // Not read.
  uint8_t padding_v2[4];
} ncclEpLayoutInfo_t;

// What a dispatch reads.
typedef struct ncclEpDispatchInputs_t {
  // Bytes of this struct.
  unsigned int size;
  // `NCCL_EP_MAGIC`.
  unsigned int magic;
  // `[T, H]`: required.
  ncclEpTensor_t *tokens;
  // float32 `[T, K]`: required by LL rank-major and in HT forward, else NULL.
  ncclEpTensor_t *topk_weights;
  // Scales `[T, S]` of the tokens: required by `NCCL_EP_DISP_QUANT_FWD`, else NULL.
  ncclEpTensor_t *scales;
} ncclEpDispatchInputs_t;

// What a dispatch writes.
typedef struct ncclEpDispatchOutputs_t {
  // Bytes of this struct.
  unsigned int size;
  // `NCCL_EP_MAGIC`.
  unsigned int magic;
  // Received rows: required.
  ncclEpTensor_t *tokens;
  // Their weights: required where the inputs have some, else NULL.
  ncclEpTensor_t *topk_weights;
  // Their scales: required by both recipes, else NULL.
  ncclEpTensor_t *scales;
  // Their ids: required by LL rank-major and HT flat forward, else NULL.
  ncclEpTensor_t *topk_idx;
} ncclEpDispatchOutputs_t;

// Options of a dispatch.
typedef struct ncclEpDispatchConfig_t {
  // Bytes of this struct.
  unsigned int size;
  // `NCCL_EP_MAGIC`.
  unsigned int magic;
  // LL: if not 0, only send now; `ncclEpComplete` receives. HT: no effect.
  unsigned int send_only;
  // Whether a cast's scales are powers of two. With `NCCL_EP_DISP_QUANT_FWD`: must be 0.
  unsigned int round_scales;
  // The pass; LL has no backward one.
  ncclEpPassDir_t pass_direction;
  // How rows travel.
  enum ncclEpDispQuant_t quant_recipe;
} ncclEpDispatchConfig_t;

// What a combine reads.
typedef struct ncclEpCombineInputs_t {
  // Bytes of this struct.
  unsigned int size;
  // `NCCL_EP_MAGIC`.
  unsigned int magic;
  // Rows of the experts: required.
  ncclEpTensor_t *tokens;
  // HT backward: float32 gradients of received weights, required. HT forward: must be NULL. LL: not read.
  ncclEpTensor_t *topk_weights;
  // Must be NULL.
  ncclEpTensor_t *scales;
} ncclEpCombineInputs_t;

// What a combine writes.
typedef struct ncclEpCombineOutputs_t {
  // Bytes of this struct.
  unsigned int size;
  // `NCCL_EP_MAGIC`.
  unsigned int magic;
  // `[T, H]`: required.
  ncclEpTensor_t *tokens;
  // float32 `[T, K]`. LL expert-major: the weights of the sums, which are read. HT backward: gets gradients.
  // Elsewhere not read.
  ncclEpTensor_t *topk_weights;
} ncclEpCombineOutputs_t;

// Options of a combine.
typedef struct ncclEpCombineConfig_t {
  // Bytes of this struct.
  unsigned int size;
  // `NCCL_EP_MAGIC`.
  unsigned int magic;
  // LL: if not 0, only send now; `ncclEpComplete` receives. HT: no effect.
  unsigned int send_only;
  // The pass; LL has no backward one.
  ncclEpPassDir_t pass_direction;
  // Only `NCCL_EP_COMB_QUANT_NONE` is served.
  enum ncclEpCombQuant_t quant_recipe;
} ncclEpCombineConfig_t;

// Options of a completion: none.
typedef struct ncclEpCompleteConfig_t {
  // Bytes of this struct.
  unsigned int size;
  // `NCCL_EP_MAGIC`.
  unsigned int magic;
} ncclEpCompleteConfig_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Creates a group over all ranks of `comm`. Collective: every rank calls it with the same `config`, and either all
// ranks get a group or all get an error. Blocks the host; runs on a stream of the library's own.
//
// A process has groups of this library or of the first release's `libnccl_ep.so`, not of both at a time.
//
// @param ep_group  gets the group; written on success only
// @param comm      communicator whose ranks form the group; must outlive the group
// @param config    see `ncclEpGroupConfig_t`
//
// Returns `ncclInvalidArgument` for a NULL pointer, or a `config` that breaks a rule or differs between ranks;
// `ncclInvalidUsage` for half an allocator, more SMs than the device has, rows to be dropped without a bound,
// variables that contradict each other, what the library does not serve yet, a process that has groups of another
// libnccl_ep, or if the ranks span several nodes and this process's NCCL cannot connect them; `ncclRemoteError` if
// another rank refused or did not arrive in time; `ncclSystemError` if the process has no NCCL;
// `ncclUnhandledCudaError` without a usable GPU; or the code of an NCCL call that failed.
ncclResult_t ncclEpCreateGroup(ncclEpGroup_t *ep_group,
                               ncclComm_t comm,
                               const struct ncclEpGroupConfig_t *config);

// Destroys a group. Collective: every rank of the group calls it, before its communicator is
// destroyed. Waits for the group's operations on all ranks. Launches of
// graphs with operations of the group must have ended. NULL is a successful
// no-op.
//
// Returns `ncclInvalidArgument` for a group that was destroyed already; `ncclSystemError` if `alloc.free_fn` fails,
// once the group is destroyed. Later calls on its handles are refused.
ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t ep_group);

// Makes a descriptor. Local. It has no memory: set `data`. The extents are copied.
//
// @param tensor    gets the descriptor; written on success only
// @param ndim      1 to 5
// @param datatype  element type
// @param sizes     `ndim` extents, slowest first
// @param config    may be NULL
//
// Returns `ncclInvalidArgument` for a NULL pointer, a bad `ndim` or an unknown `datatype`.
ncclResult_t ncclEpTensorAlloc(ncclEpTensor_t **tensor,
                               unsigned int ndim,
                               ncclDataType_t datatype,
                               const size_t *sizes,
                               const struct ncclEpTensorAllocConfig_t *config);

// Destroys a descriptor of `ncclEpTensorAlloc`, not the memory that it names. Local. NULL is a successful no-op.
//
// Returns `ncclInvalidArgument` for any other descriptor, or one that was destroyed already.
ncclResult_t ncclEpTensorDestroy(ncclEpTensor_t *tensor);

// Gets the bytes of memory that `ncclEpInitHandle` takes for such a handle. Local.
//
// @param ep_group  the group
// @param layout    how rows lie
// @param config    may be NULL
// @param size      gets the bytes
// @param num_topk  K
//
// Returns as `ncclEpInitHandle`.
ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t ep_group,
                                 ncclEpLayout_t layout,
                                 const struct ncclEpHandleConfig_t *config,
                                 size_t *size,
                                 int num_topk);

// Creates a handle without a routing, which `ncclEpUpdateHandle` gives it. Local.
//
// LL serves `NCCL_EP_LAYOUT_EXPERT_MAJOR` and `NCCL_EP_LAYOUT_RANK_MAJOR`, HT `NCCL_EP_LAYOUT_FLAT` and
// `NCCL_EP_LAYOUT_EXPERT_MAJOR`.
//
// @param handle      gets the handle; written on success only
// @param ep_group    the group
// @param layout      how rows lie
// @param config      may be NULL
// @param num_topk    K, 1 to 32; LL: at most E; HT: at most the group's `num_topk`, if that is not 0
// @param handle_mem  uint8 `[n]`, n as of `ncclEpHandleMemSize`, at a multiple of 16 bytes: what operations need of
//                    the routing will be there. Not touched before an update, or in LL a dispatch. HT: operations may
//                    be made on a handle whose memory holds what an update of an equal handle has left, or a copy of
//                    it; over several nodes not in a capture, and the host waits for the stream. NULL: memory of the
//                    group's `alloc`, or the library's. HT: on all ranks or on none, and of one update on all. A
//                    staged operation that is given up (`ncclEpHandleDestroy`) may use it until the group's end: do
//                    not free it before
//
// Returns `ncclInvalidArgument` for a NULL or dead argument, a layout that the mode has not, an alignment, memory that
// is too small or begins elsewhere, or K in LL; `ncclInvalidUsage` for K in HT, and for expert-major rows there in a
// group with neither `max_recv_tokens_per_rank` nor `num_topk`.
ncclResult_t ncclEpInitHandle(ncclEpHandle_t *handle,
                              ncclEpGroup_t ep_group,
                              ncclEpLayout_t layout,
                              const struct ncclEpHandleConfig_t *config,
                              int num_topk,
                              const ncclEpTensor_t *handle_mem);

// Routes by `topk_idx` from now on.
//
// LL: local, enqueues nothing. Every dispatch and combine reads the ids again, so they may be updated in place between
// operations.
//
// HT: collective. The ids and what is counted are read and written when `stream` reaches this call; the ids are not
// read later. In a captured `stream` each replay does so. Over several nodes a captured `stream` is refused, and the
// host waits until all ranks have exchanged their routing.
//
// @param handle       the handle
// @param topk_idx     int32 or int64 [T, K]: global expert ids of this rank's T tokens; negative ones and
//                     those from E on count as none
// @param layout_info  HT: may be NULL; `expert_counters` `[L]` or longer, `recv_total_counter` `[1]`, expert-major
//                     `expert_offsets` as the first, int32 or int64, there all of one type, in memory that the device
//                     reaches. LL: must be NULL
// @param stream       stream that orders the exchange
//
// Returns `ncclInvalidArgument` for a NULL or dead argument or a tensor that breaks a rule; `ncclInvalidUsage` while a
// staged operation waits for completion, and for a captured stream over several nodes; `ncclSystemError` if the
// group's `alloc_fn` fails; `ncclRemoteError` if another rank refused; or the code of the failure if the group has
// failed.
ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle,
                                const ncclEpTensor_t *topk_idx,
                                const struct ncclEpLayoutInfo_t *layout_info,
                                cudaStream_t stream);

// As `ncclEpInitHandle` and `ncclEpUpdateHandle`, with the K of `topk_idx`.
//
// @param handle       gets the handle; written on success only
// @param ep_group     the group
// @param layout       how rows lie
// @param topk_idx     as of `ncclEpUpdateHandle`
// @param layout_info  as of `ncclEpUpdateHandle`
// @param config       may be NULL
// @param stream       stream that orders the exchange
ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *handle,
                                ncclEpGroup_t ep_group,
                                ncclEpLayout_t layout,
                                const ncclEpTensor_t *topk_idx,
                                const struct ncclEpLayoutInfo_t *layout_info,
                                const struct ncclEpHandleConfig_t *config,
                                cudaStream_t stream);

// Destroys a handle. Local. Gives up a staged operation that was not completed. NULL is a successful no-op.
//
// Returns `ncclInvalidArgument` for a handle that was destroyed already.
ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle);

// Sends each token to the ranks that host its experts. Every rank of the group calls it, in the same order of
// operations. Enqueued on `stream`; the host does not wait, except in HT without a bound of received rows, and over
// several nodes on an HT handle in memory of the caller's and in the first operation of an LL handle.
//
// With R ranks, L local experts, M max_dispatch_tokens_per_rank, T this rank's tokens, K top-k, H hidden
// size; rows are of any type, a multiple of 16 bytes and at most max_token_bytes:
//
// LL expert-major: inputs tokens [T, H]; outputs tokens [L, R*M, H], or longer in the first extent; layout_info
// expert_counters int32 `[L]` or longer, required. The rows of each expert are packed from slot 0, by
// source rank, token, k. The counter gets their number. Other slots keep their content.
//
// LL rank-major: inputs tokens [T, H], topk_weights float32 [T, K]; outputs tokens [R, M, H], topk_idx int32 or int64
// and topk_weights float32 [R, M, K]; layout_info src_rank_counters int32 `[R]`, may be NULL. A rank receives a token
// once; the rows of each source rank are packed from slot 0, by token. The ids of a row keep their k, and are -1 where
// the expert is elsewhere; so are those of all other slots, whose rows and weights keep their content.
//
// HT flat: inputs tokens [T, H], topk_weights float32 [T, K]; outputs tokens [n, H], topk_idx int64 [n, K],
// topk_weights float32 [n, K], where n is at least the group's max_recv_tokens_per_rank, B, of which the first B rows
// are used. A rank receives a token once; rows are ordered by source rank and token. The ids of a row are local
// expert ids, ascending, then -1; its weights are in the same order, then 0. An expert that a token names more than
// once is there once, with the sum of its weights, in fp32 by ascending k. Of unused rows up to B ids are -1 and
// weights 0, and tokens keep their content. More rows than B are a failure of the group, or with
// `NCCL_EP_OVERFLOW_DROP` are dropped. In a backward pass there are tokens only.
//
// HT expert-major: inputs tokens [T, H], topk_weights float32 [T, K]; outputs tokens [n, H] and topk_weights float32
// `[n]`, where B of n slots are used; layout_info, which may be NULL, has counters as of `ncclEpUpdateHandle`. Each
// row is in a slot for every local expert that its token names. Slots lie by expert, then source rank, then token;
// those of an expert begin at a multiple of the alignment, with zeros behind the last. Behind all of them tokens keep
// their content, and weights are 0 up to B. More slots than B are a failure of the group, or with
// `NCCL_EP_OVERFLOW_DROP` are dropped. In a backward pass there are tokens only.
//
// HT without B: n is at least what comes. Rows, scales and, expert-major, weights may each be longer; they are all
// empty or none is.
//
// Recipes: with `NCCL_EP_DISP_QUANT_FWD` inputs scales [T, S] travel with their rows, to outputs scales [.., S] that
// lie as the rows do; rows and scales are multiples of 16 bytes and together at most max_token_bytes. With
// `NCCL_EP_DISP_QUANT_DS_FP8E3M4`, in LL, bfloat16 rows of a multiple of 512 elements are cast to float8e4m3, with
// outputs scales float32 [.., H/128].
//
// Delivered ids are local, or global where layout_info says so.
//
// @param handle       the routing
// @param inputs       tensors that are read
// @param outputs      tensors that are written
// @param layout_info  LL expert-major: required. Elsewhere: may be NULL
// @param config       may be NULL
// @param stream       stream to run on
//
// Returns `ncclInvalidArgument` for a NULL or dead argument or a tensor that is missing or breaks a rule;
// `ncclInvalidUsage` for a handle without a routing or whose group was destroyed, while a staged operation of the
// handle waits for completion, for a third staged operation of the group, for a backward pass in LL, for a captured
// stream in HT without B, and for a tensor without data in a window of an NCCL before 2.29; the code of the failure if
// the group has failed.
ncclResult_t ncclEpDispatch(ncclEpHandle_t handle,
                            const struct ncclEpDispatchInputs_t *inputs,
                            const struct ncclEpDispatchOutputs_t *outputs,
                            const struct ncclEpLayoutInfo_t *layout_info,
                            const struct ncclEpDispatchConfig_t *config,
                            cudaStream_t stream);

// Sends the experts' results back to the tokens' home ranks, summed in fp32 in an order that is
// always the same. Every rank of the group calls it, in the same order of operations. Enqueued on
// `stream`; rows are bfloat16, float16 or float32.
//
// LL expert-major: inputs tokens [L, R*M, H] or longer in the first extent, rows where dispatch put their tokens;
// outputs topk_weights float32 [T, K], which is read, and tokens [T, H]: for each token the weighted sum over its
// experts, on one node by ascending k, with one rounding at the end. With NCCL_EP_LL_COMBINE=reduce, and over several
// nodes, a rank that hosts several experts of a token sums their rows by ascending k, rounds the sum and sends that;
// the home rank sums by ascending rank.
//
// LL rank-major: inputs tokens [R, M, H], where dispatch put their tokens, each the sum of what the rank's experts
// give; outputs tokens [T, H]: the sum of one row from each rank, in the order of the first k that names it. Weights
// are not read.
//
// HT flat: inputs tokens [n, H], in dispatch's order, where the caller has applied the weights
// and summed the local experts of each token; outputs tokens [T, H]: the sum over ranks, on one
// node ascending. In a backward pass also inputs topk_weights float32 [n, K]: gradients as dispatch delivers weights;
// and outputs topk_weights [T, K]: those of each id, zero for one that names no expert.
//
// HT expert-major: inputs tokens [n, H], in dispatch's slots, where the caller has applied the weights; outputs tokens
// [T, H]: the sum over ranks, ascending, of each one's sum of its slots, by ascending expert, rounded. In a backward
// pass gradients are `[n]`.
//
// A token to which no expert contributes gets zeros.
//
// @param handle   the routing; LL: after a dispatch on it since its last update
// @param inputs   tensors that are read
// @param outputs  tensors that are written
// @param config   may be NULL
// @param stream   stream to run on
//
// Returns as `ncclEpDispatch`, and `ncclInvalidUsage` for an LL handle without such a dispatch, in HT without
// max_recv_tokens_per_rank for fewer rows than the dispatch has counted, and for a recipe that is not served yet.
ncclResult_t ncclEpCombine(ncclEpHandle_t handle,
                           const struct ncclEpCombineInputs_t *inputs,
                           const struct ncclEpCombineOutputs_t *outputs,
                           const struct ncclEpCombineConfig_t *config,
                           cudaStream_t stream);

// Enqueues the receive phase of the handle's staged operation on `stream`. It runs after the send
// phase, even if that was enqueued on another stream. A successful no-op if nothing is staged,
// and in HT.
//
// Two staged operations of a group may be pending at once. Before a third is sent, all ranks
// complete the same one of them, or destroy its handle.
//
// @param handle  the handle
// @param config  may be NULL
// @param stream  stream to run on
//
// Returns `ncclInvalidArgument` for a NULL or dead handle; `ncclInvalidUsage` for a handle whose
// group was destroyed, or if `stream` is not captured into the same graph as the send phase; or
// the code of the failure if the group has failed.
ncclResult_t ncclEpComplete(ncclEpHandle_t handle,
                            const struct ncclEpCompleteConfig_t *config,
                            cudaStream_t stream);

// Gets the version of the interface: MAJOR * 10000 + MINOR * 100 + PATCH.
//
// Returns `ncclInvalidArgument` if `version` is NULL.
ncclResult_t ncclEpGetVersion(int *version);

// Gets which ranks are active. Not served yet.
//
// @param ep_group  the group
// @param mask      device memory: R numbers
// @param stream    stream to run on
//
// Returns `ncclInvalidUsage`, or `ncclInvalidArgument` for a NULL or dead group.
ncclResult_t ncclEpMaskQuery(ncclEpGroup_t ep_group, int *mask, cudaStream_t stream);

// Sets which ranks are active. Not served yet.
//
// @param ep_group  the group
// @param mask      host memory: R numbers
// @param stream    stream to run on
//
// Returns as `ncclEpMaskQuery`.
ncclResult_t ncclEpMaskUpdate(ncclEpGroup_t ep_group, const int *mask, cudaStream_t stream);

// Makes all ranks active again. Not served yet.
//
// @param ep_group  the group
// @param stream    stream to run on
//
// Returns as `ncclEpMaskQuery`.
ncclResult_t ncclEpMaskClean(ncclEpGroup_t ep_group, cudaStream_t stream);

// Gets whether a rank was masked. Not served yet.
//
// @param ep_group  the group
// @param error     gets 0 or 1
//
// Returns as `ncclEpMaskQuery`.
ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t ep_group, int *error);

// Forgets that a rank was masked. Not served yet.
//
// @param ep_group  the group
//
// Returns as `ncclEpMaskQuery`.
ncclResult_t ncclEpErrorClear(ncclEpGroup_t ep_group);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

// Where a field ends, and whether a struct of a caller has it.
#define NCCL_EP_FIELD_END(type, field) (offsetof(type, field) + sizeof(((type*)0)->field))
#define NCCL_EP_HAS_FIELD(ptr, type, field) \
    ((ptr) != NULL && (ptr)->size >= NCCL_EP_FIELD_END(type, field))

// The first fields of a struct, as designated initialisers.
#define NCCL_EP_PREFIX(type, magic_number) .size = (unsigned int)sizeof(type), .magic = (magic_number)
#define NCCL_EP_TENSOR_INIT_INLINE NCCL_EP_PREFIX(ncclEpTensor_t, NCCL_EP_TENSOR_MAGIC)

// An object with size and magic, and the rest zero; NCCL_EP_STRUCT_INIT is NVIDIA's name of it.
#ifdef __cplusplus
extern "C++" {
template <typename T>
inline T ncclEpNew(unsigned int magic) {
  T made = T();
  made.size = (unsigned int)sizeof(T);
  made.magic = magic;
  return made;
}
inline ncclEpGroupConfig_t ncclEpNewGroupConfig() {
  ncclEpGroupConfig_t made = ncclEpNew<ncclEpGroupConfig_t>(NCCL_EP_MAGIC);
  made.version = NCCL_EP_API_VERSION;
  return made;
}
}
#define NCCL_EP_NEW(type, magic_number) ncclEpNew<type>(magic_number)
#define NCCL_EP_GROUP_CONFIG_INIT ncclEpNewGroupConfig()
#else
#define NCCL_EP_NEW(type, magic_number) ((type){NCCL_EP_PREFIX(type, magic_number)})
#define NCCL_EP_GROUP_CONFIG_INIT                                                    \
    ((ncclEpGroupConfig_t){NCCL_EP_PREFIX(ncclEpGroupConfig_t, NCCL_EP_MAGIC),       \
                           .version = NCCL_EP_API_VERSION})
#endif
#define NCCL_EP_STRUCT_INIT(type, magic_number) NCCL_EP_NEW(type, magic_number)

// Of each struct: the generation of this header, what earlier ones had, and an object.
#define NCCL_EP_TENSOR_CURRENT_VERSION 1
#define NCCL_EP_TENSOR_V1_LAST_FIELD sizes
#define NCCL_EP_TENSOR_V1_SIZE NCCL_EP_FIELD_END(ncclEpTensor_t, sizes)
#define NCCL_EP_TENSOR_SIZE sizeof(ncclEpTensor_t)
#define NCCL_EP_TENSOR_INIT NCCL_EP_NEW(ncclEpTensor_t, NCCL_EP_TENSOR_MAGIC)

#define NCCL_EP_TENSOR_ALLOC_CONFIG_CURRENT_VERSION 1
#define NCCL_EP_TENSOR_ALLOC_CONFIG_V1_LAST_FIELD magic
#define NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE NCCL_EP_FIELD_END(ncclEpTensorAllocConfig_t, magic)
#define NCCL_EP_TENSOR_ALLOC_CONFIG_SIZE sizeof(ncclEpTensorAllocConfig_t)
#define NCCL_EP_TENSOR_ALLOC_CONFIG_INIT NCCL_EP_NEW(ncclEpTensorAllocConfig_t, NCCL_EP_MAGIC)

#define NCCL_EP_GROUP_CONFIG_CURRENT_VERSION 3
#define NCCL_EP_GROUP_CONFIG_V1_LAST_FIELD timeout_ns
#define NCCL_EP_GROUP_CONFIG_V1_SIZE NCCL_EP_FIELD_END(ncclEpGroupConfig_t, timeout_ns)
#define NCCL_EP_GROUP_CONFIG_V2_LAST_FIELD padding_v2
#define NCCL_EP_GROUP_CONFIG_V2_SIZE NCCL_EP_FIELD_END(ncclEpGroupConfig_t, padding_v2)
#define NCCL_EP_GROUP_CONFIG_V3_LAST_FIELD combine_num_sms
#define NCCL_EP_GROUP_CONFIG_V3_SIZE NCCL_EP_FIELD_END(ncclEpGroupConfig_t, combine_num_sms)
#define NCCL_EP_GROUP_CONFIG_SIZE sizeof(ncclEpGroupConfig_t)

#define NCCL_EP_LAYOUT_INFO_CURRENT_VERSION 2
#define NCCL_EP_LAYOUT_INFO_V1_LAST_FIELD recv_total_counter
#define NCCL_EP_LAYOUT_INFO_V1_SIZE NCCL_EP_FIELD_END(ncclEpLayoutInfo_t, recv_total_counter)
#define NCCL_EP_LAYOUT_INFO_V2_LAST_FIELD padding_v2
#define NCCL_EP_LAYOUT_INFO_V2_SIZE NCCL_EP_FIELD_END(ncclEpLayoutInfo_t, padding_v2)
#define NCCL_EP_LAYOUT_INFO_SIZE sizeof(ncclEpLayoutInfo_t)
#define NCCL_EP_LAYOUT_INFO_INIT NCCL_EP_NEW(ncclEpLayoutInfo_t, NCCL_EP_MAGIC)

#define NCCL_EP_DISPATCH_INPUTS_CURRENT_VERSION 1
#define NCCL_EP_DISPATCH_INPUTS_V1_LAST_FIELD scales
#define NCCL_EP_DISPATCH_INPUTS_V1_SIZE NCCL_EP_FIELD_END(ncclEpDispatchInputs_t, scales)
#define NCCL_EP_DISPATCH_INPUTS_SIZE sizeof(ncclEpDispatchInputs_t)
#define NCCL_EP_DISPATCH_INPUTS_INIT NCCL_EP_NEW(ncclEpDispatchInputs_t, NCCL_EP_MAGIC)

#define NCCL_EP_DISPATCH_OUTPUTS_CURRENT_VERSION 1
#define NCCL_EP_DISPATCH_OUTPUTS_V1_LAST_FIELD topk_idx
#define NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE NCCL_EP_FIELD_END(ncclEpDispatchOutputs_t, topk_idx)
#define NCCL_EP_DISPATCH_OUTPUTS_SIZE sizeof(ncclEpDispatchOutputs_t)
#define NCCL_EP_DISPATCH_OUTPUTS_INIT NCCL_EP_NEW(ncclEpDispatchOutputs_t, NCCL_EP_MAGIC)

#define NCCL_EP_COMBINE_INPUTS_CURRENT_VERSION 2
#define NCCL_EP_COMBINE_INPUTS_V1_LAST_FIELD topk_weights
#define NCCL_EP_COMBINE_INPUTS_V1_SIZE NCCL_EP_FIELD_END(ncclEpCombineInputs_t, topk_weights)
#define NCCL_EP_COMBINE_INPUTS_V2_LAST_FIELD scales
#define NCCL_EP_COMBINE_INPUTS_V2_SIZE NCCL_EP_FIELD_END(ncclEpCombineInputs_t, scales)
#define NCCL_EP_COMBINE_INPUTS_SIZE sizeof(ncclEpCombineInputs_t)
#define NCCL_EP_COMBINE_INPUTS_INIT NCCL_EP_NEW(ncclEpCombineInputs_t, NCCL_EP_MAGIC)

#define NCCL_EP_COMBINE_OUTPUTS_CURRENT_VERSION 1
#define NCCL_EP_COMBINE_OUTPUTS_V1_LAST_FIELD topk_weights
#define NCCL_EP_COMBINE_OUTPUTS_V1_SIZE NCCL_EP_FIELD_END(ncclEpCombineOutputs_t, topk_weights)
#define NCCL_EP_COMBINE_OUTPUTS_SIZE sizeof(ncclEpCombineOutputs_t)
#define NCCL_EP_COMBINE_OUTPUTS_INIT NCCL_EP_NEW(ncclEpCombineOutputs_t, NCCL_EP_MAGIC)

#define NCCL_EP_HANDLE_CONFIG_CURRENT_VERSION 1
#define NCCL_EP_HANDLE_CONFIG_V1_LAST_FIELD dispatch_output_per_expert_alignment
#define NCCL_EP_HANDLE_CONFIG_V1_SIZE NCCL_EP_FIELD_END(ncclEpHandleConfig_t, dispatch_output_per_expert_alignment)
#define NCCL_EP_HANDLE_CONFIG_SIZE sizeof(ncclEpHandleConfig_t)
#define NCCL_EP_HANDLE_CONFIG_INIT NCCL_EP_NEW(ncclEpHandleConfig_t, NCCL_EP_MAGIC)

#define NCCL_EP_DISPATCH_CONFIG_CURRENT_VERSION 2
#define NCCL_EP_DISPATCH_CONFIG_V1_LAST_FIELD pass_direction
#define NCCL_EP_DISPATCH_CONFIG_V1_SIZE NCCL_EP_FIELD_END(ncclEpDispatchConfig_t, pass_direction)
#define NCCL_EP_DISPATCH_CONFIG_V2_LAST_FIELD quant_recipe
#define NCCL_EP_DISPATCH_CONFIG_V2_SIZE NCCL_EP_FIELD_END(ncclEpDispatchConfig_t, quant_recipe)
#define NCCL_EP_DISPATCH_CONFIG_SIZE sizeof(ncclEpDispatchConfig_t)
#define NCCL_EP_DISPATCH_CONFIG_INIT NCCL_EP_NEW(ncclEpDispatchConfig_t, NCCL_EP_MAGIC)

#define NCCL_EP_COMBINE_CONFIG_CURRENT_VERSION 2
#define NCCL_EP_COMBINE_CONFIG_V1_LAST_FIELD pass_direction
#define NCCL_EP_COMBINE_CONFIG_V1_SIZE NCCL_EP_FIELD_END(ncclEpCombineConfig_t, pass_direction)
#define NCCL_EP_COMBINE_CONFIG_V2_LAST_FIELD quant_recipe
#define NCCL_EP_COMBINE_CONFIG_V2_SIZE NCCL_EP_FIELD_END(ncclEpCombineConfig_t, quant_recipe)
#define NCCL_EP_COMBINE_CONFIG_SIZE sizeof(ncclEpCombineConfig_t)
#define NCCL_EP_COMBINE_CONFIG_INIT NCCL_EP_NEW(ncclEpCombineConfig_t, NCCL_EP_MAGIC)

#define NCCL_EP_COMPLETE_CONFIG_CURRENT_VERSION 1
#define NCCL_EP_COMPLETE_CONFIG_V1_LAST_FIELD magic
#define NCCL_EP_COMPLETE_CONFIG_V1_SIZE NCCL_EP_FIELD_END(ncclEpCompleteConfig_t, magic)
#define NCCL_EP_COMPLETE_CONFIG_SIZE sizeof(ncclEpCompleteConfig_t)
#define NCCL_EP_COMPLETE_CONFIG_INIT NCCL_EP_NEW(ncclEpCompleteConfig_t, NCCL_EP_MAGIC)
