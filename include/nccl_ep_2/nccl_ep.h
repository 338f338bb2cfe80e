// NCCL EP: expert-parallel dispatch and combine for Mixture-of-Experts models; the later interface, libnccl_ep.so.0.
//
// Generated from the library's sources by `make header`; do not edit.
//
// Notation: R ranks; E experts, L = E / R of them on each rank; M max_dispatch_tokens_per_rank; T tokens of this
// rank; K top-k; H hidden size.
//
// Every function returns ncclSuccess, or an error code; with NCCL_DEBUG=WARN a line tells why. Outputs are written on
// success only. Nothing exits, asserts or throws. What is marked as not served is refused with ncclInvalidUsage.
//
// Each struct begins with its size and a magic number. NCCL_EP_..._INIT sets both, and the rest to zero, the default of
// every field. Programs of earlier generations pass shorter structs, those of later ones longer structs.
//
// A process that was forked after a group was created cannot use the library: there, functions that destroy
// something do nothing, and all others return ncclInvalidUsage at once.

#pragma once

#include <stddef.h>
#include <stdint.h>
#include <cuda.h>
#include <nccl.h>
#include "nccl_ep/ep_enums.h"

// The `magic` of every struct except tensors, and that of a tensor that a program has filled in.
#define NCCL_EP_MAGIC 0xC00FFFEEu
#define NCCL_EP_TENSOR_MAGIC 0xCAFECAFEu

// An element type of later NCCL versions: two float4e2m1 in a byte.
#ifndef ncclFloat4x2
#define ncclFloat4x2 ((ncclDataType_t)12)
#endif

// The version of this interface. `ncclEpGetVersion` gets that of the library.
#define NCCL_EP_MAJOR 0

// See `NCCL_EP_MAJOR`.
#define NCCL_EP_MINOR 2

// See `NCCL_EP_MAJOR`.
#define NCCL_EP_PATCH 0

// MAJOR * 10000 + MINOR * 100 + PATCH.
#define NCCL_EP_VERSION_CODE 200

// The generation of the structs.
#define NCCL_EP_API_VERSION 3

// Lets the library choose a value.
#define NCCL_EP_AUTO 0

// How the rows of a dispatch travel.
typedef enum ncclEpDispQuant_t {
  // Unchanged.
  NCCL_EP_DISP_QUANT_NONE = 0,
  // Unchanged, with the caller's scales.
  NCCL_EP_DISP_QUANT_FWD = 1,
  // LL: the dispatch casts bfloat16 to float8e4m3 and makes scales.
  NCCL_EP_DISP_QUANT_DS_FP8E3M4 = 2,
} ncclEpDispQuant_t;

// How the rows of a combine travel.
typedef enum ncclEpCombQuant_t {
  // Unchanged.
  NCCL_EP_COMB_QUANT_NONE = 0,
  // LL. Not served.
  NCCL_EP_COMB_QUANT_NVFP4 = 1,
  // HT expert-major. Not served.
  NCCL_EP_COMB_QUANT_MXFP8 = 2,
} ncclEpCombQuant_t;

// A group of ranks that exchange tokens.
typedef struct ncclEpGroup ncclEpGroup;

// A routing of tokens to experts.
typedef struct ncclEpHandle ncclEpHandle;

// Names a group.
typedef struct ncclEpGroup *ncclEpGroup_t;

// Allocates `bytes` of device memory and stores the address in `*ptr`.
typedef cudaError_t (*ncclEpAllocFn_t)(void **ptr, size_t bytes, void *context);

// Frees memory of an `ncclEpAllocFn_t`.
typedef cudaError_t (*ncclEpFreeFn_t)(void *ptr, void *context);

// A caller's allocator: both functions or none. It allocates for handles without memory of the caller's
// (`ncclEpInitHandle` without `handle_mem`, `ncclEpCreateHandle`), at multiples of 16 bytes, as many pieces as there
// are handles at a time. `ncclEpCreateHandle` and `ncclEpUpdateHandle` call `alloc_fn`. `ncclEpGroupDestroy`, unless
// it fails, calls `free_fn` for all pieces. Both are called with the group's device current and, during a capture,
// with the thread in relaxed mode; they must not call the library. The CPU stand-ins call neither.
typedef struct ncclEpAllocConfig_t {
  // Allocates.
  ncclEpAllocFn_t alloc_fn;
  // Frees memory of `alloc_fn`.
  ncclEpFreeFn_t free_fn;
  // Passed to both.
  void *context;
} ncclEpAllocConfig_t;

// Configuration of a group; the same on every rank. Ranks compare `algorithm`, `num_experts`,
// `max_dispatch_tokens_per_rank`, `max_token_bytes` and, in HT, `max_recv_tokens_per_rank` and whether
// `overflow_policy` drops rows; nothing else.
typedef struct ncclEpGroupConfig_t {
  // Bytes of this struct.
  unsigned int size;
  // `NCCL_EP_MAGIC`.
  unsigned int magic;
  // `NCCL_EP_API_VERSION`. Not read: `size` tells which fields there are.
  unsigned int version;
  // LL or HT.
  ncclEpAlgorithm_t algorithm;
  // Experts over all ranks, E: a positive multiple of the number of ranks R. Expert `g` lives on rank `g / L` as
  // local expert `g % L`, where L = E / R.
  unsigned int num_experts;
  // Most tokens of one rank, M.
  unsigned int max_dispatch_tokens_per_rank;
  // HT: most rows (expert-major: slots) that one rank receives, B, at least M. `NCCL_EP_AUTO`: as many as come,
  // which each dispatch waits to learn. LL: not read.
  unsigned int max_recv_tokens_per_rank;
  // Most bytes of a token's row and its scales together; HT: a multiple of 16.
  unsigned int max_token_bytes;
  // Not read: the library determines what it needs.
  unsigned long rdma_buffer_size;
  // Not read.
  unsigned int num_qp_per_rank;
  // Not read.
  unsigned int num_channels;
  // Most SMs of an operation, up to those of the device, or `NCCL_EP_AUTO`. Dispatches and combines both get the
  // larger of their two budgets. NCCL_EP_COMM_SMS overrides all three budgets.
  unsigned int max_num_sms;
  // Allocates for handles without memory of the caller's. None: the library does.
  struct ncclEpAllocConfig_t alloc;
  // LL: not 0 masks lost ranks. Not served yet. HT: without effect.
  unsigned int enable_mask;
  // How long an operation waits for another rank; 0: 100 seconds. NCCL_EP_TIMEOUT_MS overrides it.
  uint64_t timeout_ns;
  // Whether tensors are in windows. Any value works, as memory outside of windows serves as well.
  ncclEpZeroCopyMode_t zero_copy;
  // HT: what happens to rows (expert-major: slots) beyond `max_recv_tokens_per_rank`.
  ncclEpOverflowPolicy_t overflow_policy;
  // HT: largest K of a handle, at most E. 0: any, but expert-major handles then need `max_recv_tokens_per_rank`.
  unsigned int num_topk;
  // Not read.
  uint8_t padding_v2[4];
  // For dispatches, instead of `max_num_sms`; 0: that one. NCCL_EP_DISPATCH_SMS overrides both.
  unsigned int dispatch_num_sms;
  // For combines, instead of `max_num_sms`; 0: that one. NCCL_EP_COMBINE_SMS overrides both.
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
  // HT expert-major: the length of each zone is a multiple of this many rows. 0, 1 or a power of two, small enough
  // that the slots that may come to a rank number less than 2^31. Elsewhere not read.
  size_t dispatch_output_per_expert_alignment;
} ncclEpHandleConfig_t;

// Names a handle.
typedef struct ncclEpHandle *ncclEpHandle_t;

// What a rank learns about the rows that it receives. Each tensor may be NULL unless stated otherwise.
typedef struct ncclEpLayoutInfo_t {
  // Bytes of this struct.
  unsigned int size;
  // `NCCL_EP_MAGIC`.
  unsigned int magic;
  // By local expert, `[L]` or longer. LL expert-major: received rows, int32; required by a dispatch. LL rank-major:
  // must be NULL. HT, int32 or int64, in an update: received rows (flat) or lengths of zones (expert-major, also in
  // a forward dispatch).
  ncclEpTensor_t *expert_counters;
  // LL rank-major: received rows by source rank, int32 `[R]` or longer; may be NULL. LL expert-major: must be NULL.
  // HT: not read.
  ncclEpTensor_t *src_rank_counters;
  // HT expert-major: where each zone begins, given as `expert_counters`. Elsewhere not read.
  ncclEpTensor_t *expert_offsets;
  // HT: number of all rows (expert-major: slots), including dropped ones; int32 or int64 `[1]`. May be given
  // wherever `expert_counters` may. LL: not read.
  ncclEpTensor_t *recv_total_counter;
  // How received ids are numbered; read by a dispatch.
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
  // Not 0: a cast's scales are powers of two. Must be 0 with `NCCL_EP_DISP_QUANT_FWD`.
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
// `ncclInvalidUsage` for half an allocator, more SMs than the device has, `NCCL_EP_OVERFLOW_DROP` without a bound of
// rows, environment variables that contradict each other, what the library does not serve yet, a process that has
// groups of another libnccl_ep, or if the ranks span several nodes and this process's NCCL cannot connect them;
// `ncclRemoteError` if another rank refused or did not arrive in time; `ncclSystemError` if the process has no NCCL;
// `ncclUnhandledCudaError` without a usable GPU; or the code of an NCCL call that failed.
ncclResult_t ncclEpCreateGroup(ncclEpGroup_t *ep_group,
                               ncclComm_t comm,
                               const struct ncclEpGroupConfig_t *config);

// Destroys a group. Collective: every rank of the group calls it, before its communicator is destroyed. Blocks the
// host until the group's operations have ended on all ranks. Launches of graphs that hold operations of the group must
// have ended. NULL is a successful no-op. Later calls on the group's handles are refused. A failed group is destroyed
// like any other: a failure that no call has returned is only logged, with NCCL_DEBUG=WARN.
//
// Returns `ncclInvalidArgument` for a group that was destroyed already; `ncclRemoteError` if other ranks do not arrive
// in time, or if operations do not end within twice that time because earlier work on their stream does not end: the
// group is gone, and its memory stays allocated; `ncclSystemError` if `alloc.free_fn` fails, once the group is
// destroyed.
ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t ep_group);

// Makes a descriptor without memory: set `data` yourself. Local. The extents are copied.
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

// Destroys a descriptor of `ncclEpTensorAlloc`, not the memory that it refers to. Local. NULL is a successful no-op.
//
// Returns `ncclInvalidArgument` for any other descriptor, or one that was destroyed already.
ncclResult_t ncclEpTensorDestroy(ncclEpTensor_t *tensor);

// Gets how many bytes of memory `ncclEpInitHandle` needs for a handle. Local.
//
// @param ep_group  the group
// @param layout    layout of rows
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

// Creates a handle without a routing; `ncclEpUpdateHandle` gives it one. Local.
//
// LL serves `NCCL_EP_LAYOUT_EXPERT_MAJOR` and `NCCL_EP_LAYOUT_RANK_MAJOR`, HT `NCCL_EP_LAYOUT_FLAT` and
// `NCCL_EP_LAYOUT_EXPERT_MAJOR`.
//
// @param handle      gets the handle; written on success only
// @param ep_group    the group
// @param layout      layout of rows
// @param config      may be NULL
// @param num_topk    K, 1 to 32; LL: at most E; HT: at most the group's `num_topk`, if that is not 0
// @param handle_mem  uint8 `[n]`, n from `ncclEpHandleMemSize`, at a multiple of 16 bytes: holds what operations need
//                    of the routing. Not touched before an update or, in LL, a dispatch. HT: on all ranks or on none,
//                    and of one update on all; operations need no update of this handle if the memory holds what an
//                    update of an equal one has left, or a copy of it. HT over several nodes: operations cannot be
//                    captured, and the host waits for the stream. An abandoned staged operation
//                    (`ncclEpHandleDestroy`) may use the memory until the group's end: do not free it before. NULL:
//                    memory of the group's `alloc`, or the library's
//
// Returns `ncclInvalidArgument` for a NULL or dead argument, a layout that the mode lacks, a bad alignment, memory
// that is too small or misaligned, or a bad K in LL; `ncclInvalidUsage` for a bad K in HT, and in HT for expert-major
// rows in a group with neither `max_recv_tokens_per_rank` nor `num_topk`.
ncclResult_t ncclEpInitHandle(ncclEpHandle_t *handle,
                              ncclEpGroup_t ep_group,
                              ncclEpLayout_t layout,
                              const struct ncclEpHandleConfig_t *config,
                              int num_topk,
                              const ncclEpTensor_t *handle_mem);

// Gives a handle a routing, that of `topk_idx`, in place of any that it has.
//
// LL: local, enqueues nothing. Every dispatch and combine reads the ids again, so they may be updated in place between
// operations.
//
// HT: collective. The ids are read and the counters written when `stream` reaches this call; the ids are not read
// later. If `stream` is captured, each replay does so. Over several nodes a captured `stream` is refused, and the host
// waits until all ranks have exchanged their routing.
//
// @param handle       the handle
// @param topk_idx     int32 or int64 [T, K]: global expert ids of this rank's T tokens; negative ids and ids of E or
//                     more are ignored
// @param layout_info  LL: must be NULL. HT: may be NULL; `expert_counters` `[L]` or longer, `recv_total_counter` `[1]`
//                     and, expert-major, `expert_offsets` like the first; each int32 or int64 (expert-major: all of
//                     one type), in memory that the device reaches
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

// Creates a handle with a routing: as `ncclEpInitHandle` and `ncclEpUpdateHandle`, with the K of `topk_idx`.
//
// @param handle       gets the handle; written on success only
// @param ep_group     the group
// @param layout       layout of rows
// @param topk_idx     as for `ncclEpUpdateHandle`
// @param layout_info  as for `ncclEpUpdateHandle`
// @param config       may be NULL
// @param stream       stream that orders the exchange
ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *handle,
                                ncclEpGroup_t ep_group,
                                ncclEpLayout_t layout,
                                const ncclEpTensor_t *topk_idx,
                                const struct ncclEpLayoutInfo_t *layout_info,
                                const struct ncclEpHandleConfig_t *config,
                                cudaStream_t stream);

// Destroys a handle. Local. Abandons a staged operation that was not completed. NULL is a successful no-op.
//
// Returns `ncclInvalidArgument` for a handle that was destroyed already.
ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle);

// Sends each token to the ranks that host its experts. Collective: every rank of the group calls it, in the same order
// of operations. Enqueued on `stream`; the host does not wait, except in HT without a bound of received rows and, over
// several nodes, on an HT handle in the caller's memory and in the first operation of an LL handle.
//
// R ranks, L local experts, M max_dispatch_tokens_per_rank, T this rank's tokens, K top-k, H hidden size. Rows are of
// any type, a multiple of 16 bytes and at most max_token_bytes.
//
// LL expert-major: inputs tokens [T, H]; outputs tokens [L, R*M, H], or longer in the first extent; layout_info
// expert_counters int32 `[L]` or longer, required. The rows of each expert are packed from slot 0, by source rank,
// token, k; the counter gets their number. Other slots keep their content. If a token repeats an expert, it takes a
// slot each time; if an expert's rows then exceed its R*M slots, the group fails.
//
// LL rank-major: inputs tokens [T, H], topk_weights float32 [T, K]; outputs tokens [R, M, H], topk_idx int32 or int64
// and topk_weights float32 [R, M, K]; layout_info src_rank_counters int32 `[R]`, may be NULL. A rank receives a token
// once; the rows of each source rank are packed from slot 0, by token. The ids of a row keep their k, and are -1 where
// the expert is on another rank. In all other slots ids are -1; rows and weights keep their content.
//
// HT flat: inputs tokens [T, H], topk_weights float32 [T, K]; outputs tokens [n, H], topk_idx int64 [n, K],
// topk_weights float32 [n, K], where n is at least the group's max_recv_tokens_per_rank, B; only the first B rows are
// used. A rank receives a token once; rows are ordered by source rank and token. The ids of a row are local expert
// ids, ascending, then -1; its weights are in the same order, then 0. If a token repeats an expert, the id is there
// once, with the sum of its weights, added in fp32 by ascending k. In unused rows up to B, ids are -1, weights are 0,
// and tokens keep their content. More rows than B are a failure of the group or, with `NCCL_EP_OVERFLOW_DROP`, are
// dropped. In a backward pass there are tokens only.
//
// HT expert-major: inputs tokens [T, H], topk_weights float32 [T, K]; outputs tokens [n, H] and topk_weights float32
// `[n]`, of whose n slots the first B are used; layout_info may be NULL, and has counters as for `ncclEpUpdateHandle`.
// Each row is in one slot for every local expert that its token names. Slots are ordered by expert, source rank and
// token. Each expert's slots begin at a multiple of the alignment, and zeros fill up the space behind them: together,
// the expert's zone. Behind all zones, tokens keep their content, and weights are 0 up to B. More slots than B are a
// failure of the group or, with `NCCL_EP_OVERFLOW_DROP`, are dropped. In a backward pass there are tokens only.
//
// HT without B: n is at least what comes. Rows, scales and, expert-major, weights may each be longer; all are empty or
// none is.
//
// Recipes: with `NCCL_EP_DISP_QUANT_FWD`, inputs scales [T, S] travel with their rows, to outputs scales [.., S] that
// lie as the rows do, with B in tensors of the same first extent; rows and scales are multiples of 16 bytes and
// together at most max_token_bytes. With `NCCL_EP_DISP_QUANT_DS_FP8E3M4`, in LL, bfloat16 rows of a multiple of 512
// elements are cast to float8e4m3, with outputs scales float32 [.., H/128].
//
// Delivered ids are local, or global if layout_info says so.
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
// stream in HT without B or, over several nodes, on an HT handle in the caller's memory, and for a tensor without data
// in a window of an NCCL before 2.29; the code of the failure if the group has failed.
ncclResult_t ncclEpDispatch(ncclEpHandle_t handle,
                            const struct ncclEpDispatchInputs_t *inputs,
                            const struct ncclEpDispatchOutputs_t *outputs,
                            const struct ncclEpLayoutInfo_t *layout_info,
                            const struct ncclEpDispatchConfig_t *config,
                            cudaStream_t stream);

// Sends the experts' results back to the tokens' home ranks and sums them, in fp32 and always in the same order.
// Collective: every rank of the group calls it, in the same order of operations. Enqueued on `stream`. Rows are
// bfloat16, float16 or float32. A token to which no expert contributes gets zeros.
//
// LL expert-major: inputs tokens [L, R*M, H] or longer in the first extent, rows where dispatch put their tokens;
// outputs topk_weights float32 [T, K], which is read, and tokens [T, H]: for each token the weighted sum over its
// experts, on one node by ascending k, with one rounding at the end. With NCCL_EP_LL_COMBINE=reduce, and over several
// nodes, a rank that hosts several experts of a token sums their rows by ascending k, rounds the sum and sends that;
// the home rank sums by ascending rank.
//
// LL rank-major: inputs tokens [R, M, H], rows where dispatch put their tokens, each the sum of what the rank's
// experts contribute; outputs tokens [T, H]: the sum of one row from each rank, in the order of the first k that names
// it. Weights are not read.
//
// HT flat: inputs tokens [n, H], in dispatch's order, where the caller has applied the weights and summed the local
// experts of each token; outputs tokens [T, H]: the sum over ranks, on one node by ascending rank. A backward pass
// also has inputs topk_weights float32 [n, K], gradients packed as dispatch delivers weights, and outputs topk_weights
// [T, K]: the gradient of each id, zero if it names no expert.
//
// HT expert-major: inputs tokens [n, H], in dispatch's slots, where the caller has applied the weights; outputs tokens
// [T, H]. Each rank sums a token's slots by ascending expert and rounds; the sum is over ranks, ascending. In a
// backward pass, gradients among the inputs are `[n]`.
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

// Enqueues the receive phase of the handle's staged operation on `stream`. It runs after the send phase, even if that
// was enqueued on another stream. A successful no-op if nothing is staged, and in HT.
//
// Two staged operations of a group may be pending at once. Before a third is sent, all ranks complete the same one of
// the two, or destroy its handle.
//
// @param handle  the handle
// @param config  may be NULL
// @param stream  stream to run on
//
// Returns `ncclInvalidArgument` for a NULL or dead handle; `ncclInvalidUsage` for a handle whose group was destroyed,
// or if `stream` is not captured into the same graph as the send phase; or the code of the failure if the group has
// failed.
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

// Where a field ends in its struct, and whether a caller's struct has it.
#define NCCL_EP_FIELD_END(type, field) (offsetof(type, field) + sizeof(((type*)0)->field))
#define NCCL_EP_HAS_FIELD(ptr, type, field) \
    ((ptr) != NULL && (ptr)->size >= NCCL_EP_FIELD_END(type, field))

// The first fields of a struct, as designated initialisers.
#define NCCL_EP_PREFIX(type, magic_number) .size = (unsigned int)sizeof(type), .magic = (magic_number)
#define NCCL_EP_TENSOR_INIT_INLINE NCCL_EP_PREFIX(ncclEpTensor_t, NCCL_EP_TENSOR_MAGIC)

// An object with size and magic set, and the rest zero; NCCL_EP_STRUCT_INIT is NVIDIA's name for it.
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

// For each struct: its generation in this header, where earlier ones end, and an initial object.
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
