// NCCL EP: expert-parallel dispatch and combine for Mixture-of-Experts models.
//
// Generated from the library's sources by `make header`; do not edit.
//
// Notation: R ranks; E experts, L = E / R of them on each rank; M max_tokens_per_rank; T tokens of this
// rank; K top-k; H hidden size.
//
// Functions that return an ncclResult_t return ncclSuccess, or an error code whose text ncclEpGetLastError returns.
// Outputs are written on success only. Nothing exits, asserts or throws.
//
// A process that was forked after a group was created cannot use the library: there, functions that destroy
// something do nothing, and all others return ncclInvalidUsage at once.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <nccl.h>

// A version as one number, in the form of `ncclEpGetVersion`; NCCL_EP_VERSION_CODE is this header's:
// #if defined(NCCL_EP_VERSION_CODE) && NCCL_EP_VERSION_CODE >= NCCL_EP_VERSION(0, 1, 0)
#define NCCL_EP_VERSION(major, minor, patch) ((major) * 10000 + (minor) * 100 + (patch))
#define NCCL_EP_VERSION_CODE NCCL_EP_VERSION(NCCL_EP_MAJOR, NCCL_EP_MINOR, NCCL_EP_PATCH)

// The version of this header. `ncclEpGetVersion` gets that of the library.
#define NCCL_EP_MAJOR 0

// See `NCCL_EP_MAJOR`.
#define NCCL_EP_MINOR 1

// See `NCCL_EP_MAJOR`.
#define NCCL_EP_PATCH 0

// The library has `ncclEpGetVersion`; others with this interface may lack it.
#define NCCL_EP_HAS_GET_VERSION 1

// The library has `ncclEpGetLastError`.
#define NCCL_EP_HAS_GET_LAST_ERROR 1

// The library has `ncclEpGetAsyncError`.
#define NCCL_EP_HAS_GET_ASYNC_ERROR 1

// The library has `ncclEpSetChoice` and `ncclEpSetSelector`.
#define NCCL_EP_HAS_CHOICES 1

// The library has `ncclEpGroupCountRows`.
#define NCCL_EP_HAS_GROUP_COUNT_ROWS 1

// The library has `ncclEpGroupTimeWaits`.
#define NCCL_EP_HAS_GROUP_TIME_WAITS 1

// The library has `ncclEpGroupTimeCombineWaits`.
#define NCCL_EP_HAS_GROUP_TIME_COMBINE_WAITS 1

// The library has `ncclEpMemAlloc` and the other functions for memory that peers map.
#define NCCL_EP_HAS_MEM 1

// The library has `ncclEpHandleWaitNumRecvTokens`.
#define NCCL_EP_HAS_HANDLE_WAIT_NUM_RECV_TOKENS 1

// The library has `ncclEpHandleOpen` and `ncclEpHandleUpdate`.
#define NCCL_EP_HAS_HANDLE_UPDATE 1

// The library has `ncclEpHandleOpenBounded`.
#define NCCL_EP_HAS_HANDLE_OPEN_BOUNDED 1

// Lets the library choose a value.
#define NCCL_EP_AUTO 0

// How a group moves tokens.
typedef enum ncclEpAlgorithm_t {
  // Low latency (LL): few tokens, 3-D output by expert or by source rank, staged operations.
  NCCL_EP_ALGO_LOW_LATENCY = 0,
  // High throughput (HT): many tokens, 2-D output, routing exchanged when a handle is created or updated.
  NCCL_EP_ALGO_HIGH_THROUGHPUT = 1,
} ncclEpAlgorithm_t;

// Tensor flags; none are defined yet.
typedef enum ncclEpTensorFlags_t {
  // No flags.
  NCCL_EP_TENSOR_FLAG_NONE = 0,
} ncclEpTensorFlags_t;

// The role of a tensor in a call. Calls find tensors by tag, in lists of any order. They ignore tensors with tags that
// they do not use, but still refuse bad sizes or strides in them.
typedef enum ncclEpTensorTag_t {
  // No meaning.
  NCCL_EP_TENSOR_TAG_NONE = 0,
  // Token rows: any type in a dispatch; bfloat16, float16 or float32 in a combine. A row is a multiple of 16 bytes.
  NCCL_EP_TENSOR_TAG_TOKENS = 1,
  // Top-k expert ids: int64; for `ncclEpHandleUpdate` also int32.
  NCCL_EP_TENSOR_TAG_TOPK_IDX = 2,
  // Top-k weights: float32.
  NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS = 3,
  // Scales of token rows, in dispatches: any type of 1, 2 or 4 bytes, or made by a cast.
  NCCL_EP_TENSOR_TAG_SCALES = 4,
  // Received tokens per local expert, in device memory: int32 `[L]`. LL rank-major: per source rank, `[R]`.
  NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE = 5,
  // Received tokens per local expert, in mapped pinned host memory: int32 `[L]`.
  NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_HOST = 6,
  // Declared for source compatibility; no call reads it.
  NCCL_EP_TENSOR_TAG_TOKENS_PER_EXPERTS = 7,
} ncclEpTensorTag_t;

// An operation for which a choice can be made.
typedef enum ncclEpOperation_t {
  // `ncclEpDispatch` in LL.
  NCCL_EP_OPERATION_LL_DISPATCH = 1,
  // `ncclEpCombine` in LL.
  NCCL_EP_OPERATION_LL_COMBINE = 2,
  // `ncclEpDispatch` in HT.
  NCCL_EP_OPERATION_HT_DISPATCH = 3,
  // `ncclEpCombine` in HT.
  NCCL_EP_OPERATION_HT_COMBINE = 4,
} ncclEpOperation_t;

// A way to run an operation.
typedef enum ncclEpVariant_t {
  // The library's own choice.
  NCCL_EP_VARIANT_AUTO = 0,
  // "ll.reduce", for LL combines: as with NCCL_EP_LL_COMBINE=reduce. No effect on rank-major rows.
  NCCL_EP_VARIANT_LL_REDUCE = 1,
  // "ll.exact", for LL combines: as with NCCL_EP_LL_COMBINE=exact. On one node only, and only if K is at most R or
  // the group was created with NCCL_EP_LL_COMBINE=exact. No effect on rank-major rows.
  NCCL_EP_VARIANT_LL_EXACT = 2,
  // "ht.ring", for both HT operations: rows pass through the library's buffers.
  NCCL_EP_VARIANT_HT_RING = 3,
  // "ht.direct", for HT dispatches: rows are stored straight into outputs that peers map. On one node only, and only
  // if all ranks have such outputs.
  NCCL_EP_VARIANT_HT_DIRECT = 4,
  // "ht.pull", for HT combines: rows are loaded straight from inputs that peers map. On one node only, and only if
  // all ranks have such inputs.
  NCCL_EP_VARIANT_HT_PULL = 5,
} ncclEpVariant_t;

// A group of ranks that exchange tokens.
typedef struct ncclEpGroup ncclEpGroup;

// One routing of tokens to experts.
typedef struct ncclEpHandle ncclEpHandle;

// Options of a handle: none are defined.
typedef struct ncclEpHandleConfig ncclEpHandleConfig;

// Names a group.
typedef struct ncclEpGroup *ncclEpGroup_t;

// Configuration of a group; the same on every rank.
typedef struct ncclEpGroupConfig_t {
  // Must be 1.
  unsigned int version;
  // LL or HT.
  enum ncclEpAlgorithm_t algorithm;
  // Experts over all ranks, E: a positive multiple of the number of ranks R. Expert `g` lives on rank `g / L` as
  // local expert `g % L`, where L = E / R.
  unsigned int num_experts;
  // Most tokens of one rank, M. `NCCL_EP_AUTO` (HT only): each handle determines its own bound.
  unsigned int max_tokens_per_rank;
  // Largest token row in bytes: hidden size times element size, a multiple of 16.
  unsigned int token_size_bytes;
  // Bytes of network buffers, or `NCCL_EP_AUTO`. Not read: the library determines what it needs.
  unsigned long rdma_buffer_size;
  // Queue pairs per rank, or `NCCL_EP_AUTO`. Not read: NCCL manages them.
  unsigned int num_qp_per_rank;
  // Most SMs that a kernel takes, in channels of 2 SMs each, or `NCCL_EP_AUTO`. Set it if your own collectives run
  // beside LL on one node, on other streams: otherwise an LL kernel there may take every SM while it waits for other
  // ranks.
  unsigned int num_channels;
} ncclEpGroupConfig_t;

// Allocates `bytes` of device memory, as `cudaMalloc` does. Returns `cudaSuccess` (0) on success.
typedef cudaError_t (*ncclEpAllocFn_t)(void **ptr, size_t bytes);

// Frees memory from the matching allocator, as `cudaFree` does. Returns `cudaSuccess` (0) on success.
typedef cudaError_t (*ncclEpFreeFn_t)(void *ptr);

// A tensor: dense and row-major, except for scales. Made by `ncclEpTensorCreate`, or filled in by the caller.
typedef struct ncclNDTensor_t {
  // Not read. 1 by convention.
  unsigned int version;
  // Number of dimensions, 1 to 5.
  unsigned int ndim;
  // Extents, slowest dimension first: host array of `ndim`.
  unsigned int *sizes;
  // Host array of `ndim`: NULL, all ones, or row-major strides in elements; all three mean "dense". Scales may have
  // other strides: see `ncclEpDispatch`.
  unsigned int *strides;
  // Element type.
  ncclDataType_t datatype;
  // Device pointer; for `RECV_EXPERT_COUNTER_HOST` a mapped pinned host pointer.
  void *data;
  // An `ncclEpTensorTag_t`.
  unsigned int tag;
  // Not read.
  enum ncclEpTensorFlags_t flags;
} ncclNDTensor_t;

// Names a handle.
typedef struct ncclEpHandle *ncclEpHandle_t;

// Options of a handle. Pass NULL for a pointer to this type.
typedef struct ncclEpHandleConfig *ncclEpHandleConfig_t;

// Options of a dispatch.
typedef struct ncclEpDispatchConfig_t {
  // If not 0, a cast rounds its float32 scales up to powers of two. Must be 0 if scales are forwarded; no effect
  // without scales.
  unsigned int round_scales;
} ncclEpDispatchConfig_t;

// Options of a combine: none are defined yet. Pass NULL or a zeroed object.
typedef struct ncclEpCombineConfig_t {
  // Not read.
  unsigned int reserved;
} ncclEpCombineConfig_t;

// Options of a completion: none are defined yet. Pass NULL or a zeroed object.
typedef struct ncclEpCompleteConfig_t {
  // Not read.
  unsigned int reserved;
} ncclEpCompleteConfig_t;

// How to run an operation. A field that is 0 leaves it to the library.
typedef struct ncclEpChoice_t {
  // Bytes of this structure.
  unsigned int size;
  // An `ncclEpVariant_t`.
  unsigned int variant;
  // Blocks of the kernel, one per SM: within the bounds of the group and of its GPU.
  unsigned int blocks;
  // How many of them send: at most `blocks`. In LL, if both are equal, every block does everything.
  unsigned int send_blocks;
  // Threads per block: a multiple of 32, up to 1024. A kernel with a lower limit uses that.
  unsigned int threads;
  // If not 0, the kernel is not launched while the one before it on its stream runs. LL kernels on one node
  // otherwise are.
  unsigned int in_order;
} ncclEpChoice_t;

// What a selector is told about an operation.
typedef struct ncclEpQuery_t {
  // Bytes of this structure; later versions may have more at its end.
  unsigned int size;
  // An `ncclEpOperation_t`.
  unsigned int operation;
  // This rank's tokens, T.
  unsigned int tokens;
  // K.
  unsigned int top_k;
  // Bytes of a row as it travels, without scales.
  unsigned int row_bytes;
  // R.
  unsigned int ranks;
  // Most SMs that the operation may take, one per block; 0 on the CPU, where nothing bounds it.
  unsigned int sms;
  // Not 0 if peers map the TOKENS that a dispatch delivers or a combine takes: memory of `ncclEpMemAlloc` or
  // `ncclEpMemRegister`.
  unsigned int symmetric;
} ncclEpQuery_t;

// Chooses how to run an operation. Writes to `choice`, whose fields are 0 except for its size, and returns not 0; or
// returns 0 to choose nothing.
typedef int (*ncclEpSelect_t)(void *user,
                              const struct ncclEpQuery_t *query,
                              struct ncclEpChoice_t *choice);

// What `ncclEpMemInfo` reports. Later versions may have more fields at the end.
typedef struct ncclEpMemInfo_t {
  // Bytes of the structure, set by the caller.
  size_t size;
  // The object's number, 0 to 63, the same on all ranks. Numbers of freed objects are reused.
  unsigned int object;
  // How many other ranks map this rank's memory of the object, and this rank theirs: those of its node.
  unsigned int peers;
  // Offset of the given address in this rank's memory of the object.
  size_t offset;
  // Bytes of this rank's memory of the object.
  size_t bytes;
  // Host array of R addresses: where this rank sees each rank's memory of the object. NULL for ranks of other nodes.
  // Valid as long as the object.
  void *const *peer_data;
  // How many tensors of operations lay in the object.
  unsigned long tensors;
  // How many tensors of the group's operations lay in no object while the group had one; their rows are copied as
  // usual. Counts only tensors that an object could have served: in HT, rows that a dispatch delivers or a combine
  // takes.
  unsigned long plain_tensors;
  // On GPUs: how many HT operations of the group passed rows through the library's buffers although their tensor lay
  // in memory that peers map, because another rank's did not. A `size` of 56 bytes has no such field.
  unsigned long fallbacks;
} ncclEpMemInfo_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Creates a group over all ranks of `comm`. Collective: every rank calls it with the same `config`, and either all
// ranks get a group or all get an error. Blocks the host.
//
// @param ep_group  gets the group; written on success only
// @param comm      communicator whose ranks form the group; must outlive the group
// @param config    see `ncclEpGroupConfig_t`
// @param stream    stream for the exchanges of the creation; NULL is the default stream
// @param alloc_fn  allocates the data of `ncclEpTensorCreate`; NULL means `cudaMalloc`
// @param free_fn   frees that data; NULL means `cudaFree`, see `ncclEpTensorDestroy`
//
// Returns `ncclInvalidArgument` for a NULL pointer, or a `config` that breaks a rule or differs between ranks;
// `ncclInvalidUsage` if `stream` is being captured into a graph (the capture goes on), or if the ranks span several
// nodes and this process's NCCL cannot connect them; `ncclRemoteError` if another rank refused or did not arrive
// within NCCL_EP_TIMEOUT_MS; `ncclSystemError` if the process has no NCCL; `ncclUnhandledCudaError` without a usable
// GPU; or the code of an NCCL call that failed.
ncclResult_t ncclEpCreateGroup(ncclEpGroup_t *ep_group,
                               ncclComm_t comm,
                               const struct ncclEpGroupConfig_t *config,
                               cudaStream_t stream,
                               ncclEpAllocFn_t alloc_fn,
                               ncclEpFreeFn_t free_fn);

// Destroys a group. Collective: every rank of the group calls it, before its communicator is destroyed. Blocks the
// host until the group's operations have ended on all ranks. Launches of graphs that hold operations of the group must
// have ended, or be on `stream`. NULL is a successful no-op.
//
// It waits for nothing else, and captures of other streams go on, with one exception: on one node, if graphs hold
// operations of the group, it waits for its whole device, which ends all captures there.
//
// Destroy the group's handles first: later calls on them are refused. Tensors of the group stay valid and may be
// destroyed afterwards. Memory of `ncclEpMemAlloc` that was not freed is freed.
//
// @param ep_group  the group
// @param stream    stream for the closing exchange; NULL is the default stream
//
// Returns `ncclInvalidArgument` for a group that was destroyed already; `ncclInvalidUsage` if `stream` is being
// captured into a graph: the capture and the group go on; `ncclRemoteError` if other ranks do not arrive within
// NCCL_EP_TIMEOUT_MS, or if operations do not end within twice that because earlier work on their stream does not end:
// the group is gone, and its memory stays allocated.
ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t ep_group,
                                cudaStream_t stream);

// Allocates a dense tensor in device memory and fills in its descriptor. Local. The data is not initialised. While a
// stream is being captured this works as usual, outside of the graph, and `alloc_fn` may call `cudaMalloc`; the same
// holds for `ncclEpTensorDestroy` and `free_fn`.
//
// @param ep_group  group whose `alloc_fn` allocates the data
// @param tensor    gets the descriptor; written on success only
// @param ndim      1 to 5
// @param datatype  element type
// @param tag       role of the tensor; may be changed in the descriptor later
// @param size0     extent of the slowest dimension; `size1` to `size4` follow, those beyond `ndim` are ignored
//
// Returns `ncclInvalidArgument` for a NULL or dead group, a NULL `tensor`, a bad `ndim`, an unknown `datatype` or a
// size beyond the address space; `ncclSystemError` if `alloc_fn` fails; `ncclUnhandledCudaError` if the device has no
// memory left.
ncclResult_t ncclEpTensorCreate(ncclEpGroup_t ep_group,
                                struct ncclNDTensor_t *tensor,
                                unsigned int ndim,
                                ncclDataType_t datatype,
                                enum ncclEpTensorTag_t tag,
                                unsigned int size0,
                                unsigned int size1,
                                unsigned int size2,
                                unsigned int size3,
                                unsigned int size4);

// Frees a descriptor's data and arrays and sets their pointers to NULL, so that a second call is harmless. Local. NULL
// is a successful no-op.
//
// The arrays are released with `free()`. Data that `ncclEpTensorCreate` made is freed by the counterpart of its
// allocator, even after the group was destroyed. Views of low-latency rows and memory of `ncclEpMemAlloc` are kept, as
// they end with the group or by `ncclEpMemFree`. Other data is freed by the `free_fn` of `ep_group`, or kept if
// `ep_group` is NULL.
//
// Where no `free_fn` was given, data is freed by `cudaFree`, which waits for the device. So the data stays allocated
// until a later call while an exchange or operation of this library runs or is stuck there, or a graph holds one (on
// one node: while a group with captured operations is alive). If more than 256 allocations wait, or 256 MiB only for
// graphs, the oldest are freed without waiting, unless something is stuck. Your work on them must have ended.
//
// @param ep_group  the tensor's group, alive or destroyed, or NULL
// @param tensor    the descriptor
//
// Returns `ncclSystemError` or `ncclUnhandledCudaError` if freeing the data fails.
ncclResult_t ncclEpTensorDestroy(ncclEpGroup_t ep_group,
                                 struct ncclNDTensor_t *tensor);

// Creates a handle: one routing of this rank's tokens to experts.
//
// LL on one node: local, enqueues nothing. LL over several nodes: collective, in the same order on all ranks. The
// ranks exchange T and K on a stream of the library's own, behind the group's earlier operations; the first operation
// waits on the host if that has not arrived, at most twice NCCL_EP_TIMEOUT_MS. If a rank refuses its handle, ranks
// that forward for it refuse operations on theirs (`ncclRemoteError`); the group goes on, and all ranks create another
// handle.
//
// LL, either way: every dispatch and combine reads the ids again, so they may be updated in place between operations;
// a combine uses them to find the rows of the last dispatch. The data of the ids must stay valid as long as the handle
// is used; the descriptor need not.
//
// HT: collective. The ranks exchange the routing; the ids are read once, when `stream` reaches this call. On the GPUs
// of one node the host does not wait for that. Over several nodes it does, because message sizes depend on it, and the
// group fails if earlier work on `stream` takes longer than twice NCCL_EP_TIMEOUT_MS.
//
// While a stream is being captured, LL handles can be created as usual and are no part of the graph. HT refuses a
// captured `stream`.
//
// @param handle             gets the handle; written on success only
// @param ep_group           the group
// @param topk_idx           TOPK_IDX, int64 [T, K]: expert ids of this rank's T tokens. T is at most
//                           max_tokens_per_rank, may differ between ranks and may be 0. K is at most 32 and the same
//                           on every rank. Negative ids and ids of E or more are ignored.
// @param local_tensors      HT: optional RECV_EXPERT_COUNTER_HOST or RECV_EXPERT_COUNTER_DEVICE, int32 `[L]` or
//                           longer: gets the received tokens per local expert, valid once `stream` is synchronised.
//                           LL: none.
// @param num_local_tensors  number of local tensors
// @param config             must be NULL
// @param stream             stream that orders the exchange; NULL is the default stream
// @param use_fp8            no effect
//
// Returns `ncclInvalidArgument` for a NULL or dead argument or a tensor that breaks a rule, and the code of the
// failure if the group has failed. HT: `ncclInvalidUsage` if `stream` is captured; `ncclRemoteError` or
// `ncclInvalidArgument` if another rank refused or has another K. These two come from this call on the CPU backend and
// over several nodes; on the GPUs of one node, from calls on the handle once the exchange has run.
ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *handle,
                                ncclEpGroup_t ep_group,
                                const struct ncclNDTensor_t *topk_idx,
                                struct ncclNDTensor_t *const *local_tensors,
                                unsigned int num_local_tensors,
                                const ncclEpHandleConfig_t *config,
                                cudaStream_t stream,
                                bool use_fp8);

// Opens a handle without a routing; `ncclEpHandleUpdate` gives it one. Local, enqueues nothing.
//
// HT: the handle keeps the ids of its update. A dispatch is a forward one if its inputs include TOPK_WEIGHTS; it does
// not read TOPK_IDX. A combine returns gradients of weights [T, K] by k: for each id that of the expert it names, or 0
// if it names none.
//
// HT with `expert_alignment`: rows lie by expert, one for each expert that a token names. A forward dispatch has
// outputs TOKENS [n, H] and TOPK_WEIGHTS float32 `[n]`, and no TOPK_IDX. Rows are ordered by expert, source rank and
// token. Each expert's rows begin at a multiple of the alignment, and zeros fill up the space behind them. Behind the
// last expert, TOKENS and SCALES `[n, S]` keep their content, and weights are 0. Scales are forwarded; a cast is
// refused. A combine has inputs TOKENS [n, H], to which the caller has applied the weights: each rank sums a token's
// rows by ascending expert and rounds that sum. Gradients are TOPK_WEIGHTS `[n]`. `ncclEpHandleGetNumRecvTokens` gets
// the most rows that an update may bring.
//
// @param handle            gets the handle; written on success only
// @param ep_group          the group
// @param expert_alignment  0, or a power of two: HT, in a group with max_tokens_per_rank and at most 1,048,576 tokens
//                          on all ranks together; small enough that the rows that may come to a rank, by expert and
//                          filled up, number less than 2^31
//
// Returns `ncclInvalidArgument` for a NULL or dead argument or another alignment.
ncclResult_t ncclEpHandleOpen(ncclEpHandle_t *handle,
                              ncclEpGroup_t ep_group,
                              unsigned int expert_alignment);

// As `ncclEpHandleOpen` for rows by expert, of which there are at most `max_rows`. An update drops those beyond, the
// last experts' first. Its counters, and those of `ncclEpGroupCountRows`, count all. What is dropped adds nothing to a
// combine, and its gradient is 0. Operations need rows for all that `ncclEpHandleGetNumRecvTokens` gets, which is the
// bound or fewer; further rows of larger tensors are undefined.
//
// @param handle            gets the handle; written on success only
// @param ep_group          the group
// @param expert_alignment  as in `ncclEpHandleOpen`, but 0 means 1 (there it means: no rows by expert)
// @param max_rows          rows that this rank has room for; ranks may differ
//
// Returns as `ncclEpHandleOpen`, and `ncclInvalidArgument` for a group that has no rows by expert.
ncclResult_t ncclEpHandleOpenBounded(ncclEpHandle_t *handle,
                                     ncclEpGroup_t ep_group,
                                     unsigned int expert_alignment,
                                     unsigned int max_rows);

// Gives a handle a routing, in place of any that it has. What it reads, writes and waits for, and where it is
// collective, is as for `ncclEpCreateHandle`.
//
// HT on the GPUs of one node: `stream` may be captured into a graph, with a handle of `ncclEpHandleOpen`. Each replay
// then routes by the ids that it finds in memory, and writes the counter. Operations on the handle belong in the same
// graph and need room for the rows of any routing, as the host does not wait for their number.
//
// @param handle             the handle
// @param topk_idx           as for `ncclEpCreateHandle`; with a handle of `ncclEpHandleOpen` also int32
// @param local_tensors      as for `ncclEpCreateHandle`; where rows lie by expert, the counter does not include
//                           padding
// @param num_local_tensors  number of local tensors
// @param stream             stream that orders the exchange; NULL is the default stream
//
// Returns as `ncclEpCreateHandle`, and `ncclInvalidUsage` while a staged operation waits for completion. After a
// refusal this rank's routing is what it was.
ncclResult_t ncclEpHandleUpdate(ncclEpHandle_t handle,
                                const struct ncclNDTensor_t *topk_idx,
                                struct ncclNDTensor_t *const *local_tensors,
                                unsigned int num_local_tensors,
                                cudaStream_t stream);

// Destroys a handle. Local. Abandons a staged operation that was not completed. Does not touch the tensor of the ids.
// NULL is a successful no-op.
//
// Returns `ncclInvalidArgument` for a handle that was destroyed already.
ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle);

// Gets the number of rows that an HT dispatch of this handle can deliver to this rank. Local.
//
// That is R * max_tokens_per_rank, or the real count if the group's max_tokens_per_rank is NCCL_EP_AUTO. Where rows
// lie by expert, it is the most that any update with the handle's K may bring, filled up. The real count is known once
// the stream of the handle's creation has reached that call; this call waits for it.
//
// @param handle           an HT handle
// @param num_recv_tokens  gets the number of rows
//
// Returns `ncclInvalidArgument` for a NULL or dead argument, `ncclInvalidUsage` for an LL handle; with NCCL_EP_AUTO
// also the error of an exchange for which the creation did not wait.
ncclResult_t ncclEpHandleGetNumRecvTokens(ncclEpHandle_t handle,
                                          unsigned int *num_recv_tokens);

// As `ncclEpHandleGetNumRecvTokens`, but waits at most `timeout_ms`, so that a program can look at other things, such
// as signals, and call again. The deadline of the exchange counts from the first of these calls.
//
// @param handle           an HT handle
// @param timeout_ms       milliseconds; 0 looks without waiting
// @param num_recv_tokens  gets the number of rows
//
// Returns `ncclInProgress`, which is no failure, if the number is not known yet: `num_recv_tokens` is not written. All
// else as `ncclEpHandleGetNumRecvTokens`.
ncclResult_t ncclEpHandleWaitNumRecvTokens(ncclEpHandle_t handle,
                                           unsigned int timeout_ms,
                                           unsigned int *num_recv_tokens);

// Sends each token to the ranks that host its experts. Collective: every rank of the group calls it, in the same order
// of operations. Enqueued on `stream`; the host does not wait, except in the first operation of an LL handle over
// several nodes, if the other nodes have not created theirs.
//
// A group's operations run one after the other in the order of the calls, whatever their streams. The caller orders
// launches of graphs, among each other and with other operations. A handle must outlive the graphs that hold its
// operations. At most four captures with operations of a group may be interleaved. A staged operation occupies one of
// its group's two slots, a captured one in each replay. Do not launch its graph while a staged operation that was sent
// outside of it, after the capture, waits for `ncclEpComplete`: both may wait until the deadline.
//
// R ranks, L local experts, M max_tokens_per_rank, T this rank's tokens, K top-k, H hidden size. Rows are of any type,
// a multiple of 16 bytes and, with their scales, at most token_size_bytes.
//
// LL: inputs TOKENS [T, H]; outputs TOKENS [L, R*M, H]; local_tensors optional RECV_EXPERT_COUNTER_DEVICE int32 `[L]`.
// The rows of each expert are packed from slot 0, by source rank, token, k; the counter gets their number. Other slots
// keep their content. If a token repeats an expert, each repetition takes a slot. If repetitions bring an expert more
// rows than its R*M slots hold, the group fails, with a text that names the expert and a rank.
//
// LL rank-major, if outputs include TOPK_IDX: inputs TOKENS [T, H], TOPK_WEIGHTS float32 [T, K]; outputs TOKENS
// [R, M, H], TOPK_IDX int64 [R, M, K], TOPK_WEIGHTS float32 [R, M, K]; local_tensors optional
// RECV_EXPERT_COUNTER_DEVICE int32 `[R]`. A rank receives a token once, however many of its experts the token names.
// The rows of each source rank are packed from row 0, by token; the counter gets their number. A row has all K weights
// of its token; entry k of its ids is the local id of the token's expert k if that expert is on this rank, else -1. In
// other rows all ids are -1; tokens and weights keep their content.
// If the data of outputs TOKENS is NULL (on every rank or on none), rows stay in a view, memory of the library whose
// address is stored there. Rows of a view that hold nothing have arbitrary content and must not be written. The view
// lives until the handle's next combine begins (which may read it), or until the second later dispatch of the group
// with a view begins, whichever is earlier. Only the order of the stream tells when; nothing else signals it. In
// graphs a view has the same address in each replay.
//
// HT forward: inputs TOKENS [T, H], TOPK_IDX int64 [T, K], TOPK_WEIGHTS float32 [T, K]; outputs TOKENS [n, H],
// TOPK_IDX [n, K], TOPK_WEIGHTS [n, K], where n is at least the number of received tokens. A rank receives a token
// once; rows are ordered by source rank and token. The ids of a row are local expert ids, ascending, then -1; its
// weights are in the same order, then 0. If a token repeats an expert, the id is there once, with the sum of its
// weights, added in fp32 by ascending k. Unused rows are 0, -1 and 0.
// HT tokens only (cached, or the backward of a combine): inputs and outputs TOKENS.
// In both, local_tensors may hold RECV_EXPERT_COUNTER_DEVICE int32 `[L]`.
//
// Scales, in every form: outputs SCALES [L, R*M, S] (LL), [R, M, S] (rank-major) or [n, S] (HT); unused rows are as
// those of TOKENS. With inputs SCALES [T, S], of a type of 1, 2 or 4 bytes, rows and scales arrive unchanged. Without,
// the dispatch casts: TOKENS are bfloat16, float16 or float32 and arrive as float8e4m3, declared as that, uint8 or
// int8. The type and S of outputs SCALES select the cast: float32, one for 128 elements; uint8 (UE8M0), one for 128 or
// for 32; int32 or uint32, four UE8M0 in each. A row with its scales, padded to 16 bytes, must fit token_size_bytes.
// SCALES may have strides: row-major (.., P, 1), P at least S, or column-major (.., 1, P), P at least the rows;
// experts are at least P times the other extent apart. docs/formats.md has the formulas.
//
// @param handle             the routing
// @param inputs             tensors that are read
// @param num_inputs         their number
// @param outputs            tensors that are written
// @param num_outputs        their number
// @param local_tensors      tensors of this rank alone
// @param num_local_tensors  their number
// @param send_only          LL: if not 0, only send now; `ncclEpComplete` receives. The same on every rank. HT: no
//                           effect
// @param config             may be NULL
// @param stream             stream to run on; NULL is the default stream
//
// Returns `ncclInvalidArgument` for a NULL or dead argument or a tensor that is missing or breaks a rule;
// `ncclInvalidUsage` for a handle whose group was destroyed, while a staged operation of the handle waits for
// completion, or for a third staged operation of the group; the code of the failure if the group has failed. HT on the
// GPUs of one node: `ncclRemoteError` or `ncclInvalidArgument` once it is known that another rank refused the handle
// or has another K.
ncclResult_t ncclEpDispatch(ncclEpHandle_t handle,
                            const struct ncclNDTensor_t *const *inputs,
                            unsigned int num_inputs,
                            struct ncclNDTensor_t *const *outputs,
                            unsigned int num_outputs,
                            struct ncclNDTensor_t *const *local_tensors,
                            unsigned int num_local_tensors,
                            unsigned int send_only,
                            const struct ncclEpDispatchConfig_t *config,
                            cudaStream_t stream);

// Sends the experts' results back to the tokens' home ranks and sums them, in fp32 and always in the same order.
// Collective: every rank of the group calls it, in the same order of operations. Enqueued on `stream`; the host does
// not wait, except as in `ncclEpDispatch`. A token to which no expert contributes gets zeros.
//
// LL: inputs TOKENS [L, R*M, H], rows where dispatch put their tokens; local_tensors TOPK_WEIGHTS float32 [T, K];
// outputs TOKENS [T, H]: for each token the weighted sum over its experts. A rank that hosts several experts of a
// token sums their rows by ascending k, as dispatched, rounds the sum and sends that; on one node the home rank sums
// by ascending rank. With NCCL_EP_LL_COMBINE=exact, on one node only, the home rank sums all rows, by ascending k of
// the combine, without rounding in between.
//
// LL after a rank-major dispatch of the handle: inputs TOKENS [R, M, H], where each token's row is what this rank's
// experts contribute, weighted and summed by the caller; no weights; outputs TOKENS [T, H]: for each token the sum of
// the rows of its ranks, ordered by the lowest k whose expert is on the rank, whatever NCCL_EP_LL_COMBINE says. The
// ids are those at the dispatch, not the current ones.
//
// LL otherwise reads the ids again and finds the rows by them, so a token's (id, weight) pairs may be permuted in
// place between a dispatch and its combine. If a token repeats an expert, its m-th entry means the m-th that was
// dispatched; surplus entries add their weights to the last one dispatched. An id that was masked (made negative)
// since the dispatch, or that was not dispatched, is ignored.
//
// HT forward: inputs TOKENS [n, H], in dispatch's order, where the caller has applied the weights and summed the local
// experts of each token; outputs TOKENS [T, H]: the sum over ranks, on one node by ascending rank.
// HT backward: also inputs TOPK_WEIGHTS float32 [n, K], packed as dispatch delivers weights; outputs TOPK_WEIGHTS
// [T, K]: by ascending global expert id, then zeros. An expert that a token repeats has one column: the gradient of
// the sum of its weights, which is that of each of them.
//
// Over several nodes both modes sum node by node: another node's sum is rounded once, because it travels as a row. So
// the last bits of a token depend on its home node, unless NCCL_EP_NODE_SUMS=invariant. docs/several-nodes.md has the
// order of nodes.
//
// @param handle             the routing; LL: after a dispatch on it, which, if captured, must have been replayed
// @param inputs             tensors that are read
// @param num_inputs         their number
// @param outputs            tensors that are written
// @param num_outputs        their number
// @param local_tensors      tensors of this rank alone
// @param num_local_tensors  their number
// @param send_only          LL: if not 0, only send now; `ncclEpComplete` receives. The same on every rank. HT: no
//                           effect
// @param config             may be NULL
// @param stream             stream to run on; NULL is the default stream
//
// Returns as `ncclEpDispatch`, and `ncclInvalidUsage` for an LL handle without a dispatch.
ncclResult_t ncclEpCombine(ncclEpHandle_t handle,
                           const struct ncclNDTensor_t *const *inputs,
                           unsigned int num_inputs,
                           struct ncclNDTensor_t *const *outputs,
                           unsigned int num_outputs,
                           struct ncclNDTensor_t *const *local_tensors,
                           unsigned int num_local_tensors,
                           unsigned int send_only,
                           const struct ncclEpCombineConfig_t *config,
                           cudaStream_t stream);

// Enqueues the receive phase of the handle's staged operation on `stream`. It runs after the send phase, even if that
// was enqueued on another stream. A successful no-op if nothing is staged, and in HT.
//
// Two staged operations of a group may be pending at once. Before a third is sent, all ranks complete the same one of
// the two, or destroy its handle. A refused call changes nothing and may be repeated.
//
// @param handle  the handle
// @param config  may be NULL
// @param stream  stream to run on; NULL is the default stream
//
// Returns `ncclInvalidArgument` for a NULL or dead handle; `ncclInvalidUsage` for a handle whose group was destroyed,
// or if `stream` is not captured into the same graph as the send phase; or the code of the failure if the group has
// failed.
ncclResult_t ncclEpComplete(ncclEpHandle_t handle,
                            const struct ncclEpCompleteConfig_t *config,
                            cudaStream_t stream);

// Gets the library's version: MAJOR * 10000 + MINOR * 100 + PATCH.
//
// Returns `ncclInvalidArgument` if `version` is NULL.
ncclResult_t ncclEpGetVersion(int *version);

// Returns one line that explains this library's last refusal in the calling thread: function, argument, rule, got and
// expected. Empty if nothing was refused yet; never NULL. Valid until the next refusal in the same thread.
const char *ncclEpGetLastError(void);

// Reports whether an operation of `ep_group` failed while it ran, as `ncclCommGetAsyncError` does for NCCL.
//
// Writes `ncclSuccess`, or the code of the first failure, to `*result`; after a failure, `ncclEpGetLastError` returns
// its text. A failed group refuses further operations; destroy it.
//
// Returns `ncclInvalidArgument` for a NULL or dead `ep_group` or a NULL `result`.
ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t ep_group,
                                 ncclResult_t *result);

// Chooses how this rank runs each later `operation` of a group: a variant, a launch shape, or both. The choice is
// copied.
//
// In order of precedence: a choice set here, the selector's, that of the file NCCL_EP_TUNING_FILE, the library's own.
// A choice that is impossible in a call is skipped there; if only its launch shape does not fit, its variant stays.
// With NCCL_DEBUG=WARN one line of each kind says why. The choice is made in the operation's call, so replays of a
// graph keep it.
//
// LL variants change the last bits of results and must be the same on every rank; otherwise the operation fails on all
// ranks, with a text. Whether one is possible depends only on what all ranks have in common. Everything else is up to
// each rank, and changes no bit.
//
// @param ep_group   the group
// @param operation  an `ncclEpOperation_t`; one of the other algorithm has no effect
// @param choice     NULL removes the choice
//
// Returns `ncclInvalidArgument` for a dead group, an unknown operation, or a `choice->size` that is not the size of
// the structure.
ncclResult_t ncclEpSetChoice(ncclEpGroup_t ep_group,
                             unsigned int operation,
                             const struct ncclEpChoice_t *choice);

// Lets `select` choose for each operation of this rank that has no choice set. What it chooses counts as with
// `ncclEpSetChoice`.
//
// `select` runs in the call of the operation, on the caller's thread, and concurrently if threads call operations
// concurrently. It may be asked about an operation that is then refused. It should take a fraction of a microsecond,
// and must not wait for other ranks, throw, or call the library for this group. Do not replace it while another thread
// is in an operation of the group, which may still call the old one.
//
// @param ep_group  the group
// @param select    NULL: no selector
// @param user      is passed to `select`
//
// Returns `ncclInvalidArgument` for a dead group.
ncclResult_t ncclEpSetSelector(ncclEpGroup_t ep_group,
                               ncclEpSelect_t select,
                               void *user);

// Makes every later dispatch of the group add the rows that each local expert receives to `rows_of_expert`. Local:
// ranks may differ. HT: counts all dispatches. LL: counts those that deliver rows by expert and have a
// RECV_EXPERT_COUNTER_DEVICE.
//
// A separate small kernel adds them, on the stream behind the dispatch, or behind `ncclEpComplete` if it is staged.
// Graphs that are captured from now on contain it, and keep the address.
//
// @param ep_group        the group
// @param rows_of_expert  int64 `[L]` on the device. The caller sets it to zero first, reads or clears it at will on a
//                        stream behind the dispatches, and keeps it until they have ended. NULL stops counting
//
// Returns `ncclInvalidArgument` for a NULL or dead `ep_group`, or a `rows_of_expert` that is not a multiple of 8; the
// code of the failure if the group has failed.
ncclResult_t ncclEpGroupCountRows(ncclEpGroup_t ep_group,
                                  int64_t *rows_of_expert);

// Makes every later LL dispatch of the group add to `ns_of_source` how long this rank waits for each other rank.
// Local: ranks may differ. HT dispatches are not timed.
//
// A wait is the nanoseconds from when the dispatch is ready to receive until the source rank has told how many rows it
// sends; in a staged dispatch, within `ncclEpComplete`. So `ns_of_source[r]` shows how much later rank r began its
// dispatch than this rank. Waits overlap, so their sum means nothing. Over several nodes, earlier waits for the
// network's messages are not included.
//
// The dispatch's own kernel adds them, also in graphs that are captured from now on, which keep the address.
//
// @param ep_group      the group
// @param ns_of_source  int64 `[R]` on the device, under the rules of `ncclEpGroupCountRows` for `rows_of_expert`; NULL
//                      stops timing
//
// Returns `ncclInvalidArgument` for a NULL or dead `ep_group`, or an `ns_of_source` that is not a multiple of 8; the
// code of the failure if the group has failed.
ncclResult_t ncclEpGroupTimeWaits(ncclEpGroup_t ep_group,
                                  int64_t *ns_of_source);

// As `ncclEpGroupTimeWaits`, but for combines, LL and HT.
//
// A wait is the nanoseconds from when the combine has told the others what they need until a rank has begun it, too;
// in HT, until the first row from that rank arrives, or the rank tells where its rows lie. A staged combine is timed
// in both phases: if its send phase waits for weights, it waits for all ranks there. Over several nodes HT times only
// the ranks of its node.
//
// @param ep_group      the group
// @param ns_of_source  int64 `[R]` on the device, may be that of `ncclEpGroupTimeWaits`; NULL stops timing
//
// Returns as `ncclEpGroupTimeWaits`.
ncclResult_t ncclEpGroupTimeCombineWaits(ncclEpGroup_t ep_group,
                                         int64_t *ns_of_source);

// Allocates `bytes` of device memory that all ranks of the same node map: an object of the group. Collective, in the
// same order as the group's other memory calls on all ranks; either all ranks get memory or all get an error. `bytes`
// may differ between ranks. Blocks the host, and enqueues nothing on the caller's streams.
//
// Operations recognise a tensor whose rows lie wholly in such memory, at a multiple of 16 bytes, by its address,
// whatever the other ranks pass. Its rows then need not be copied where both ends can avoid it. Offsets may differ
// between ranks. Results are the same as with any other memory.
//
// The content is arbitrary at first. Memory that is not freed before ends with the group.
//
// @param ep_group  the group
// @param ptr       gets the address on this rank; written on success only
// @param bytes     bytes on this rank, not 0
//
// Returns `ncclInvalidArgument` for a NULL or dead argument or 0 bytes; `ncclInvalidUsage` if the group has 64
// objects, if the default stream is captured into a graph or waits for a stream that is, or if another rank makes
// another call; `ncclUnhandledCudaError` without memory; `ncclRemoteError` if another rank refused, or did not arrive
// within NCCL_EP_TIMEOUT_MS: then the group has failed; and the code of the failure if the group had failed before.
ncclResult_t ncclEpMemAlloc(ncclEpGroup_t ep_group,
                            void **ptr,
                            size_t bytes);

// Frees memory of `ncclEpMemAlloc`. Collective: all ranks free the same object. Blocks the host until the group's
// operations have run; the caller's other work must not use the memory any more. If a rank fails or does not arrive,
// the memory stays allocated, because that rank might still write there.
//
// @param ep_group  the group
// @param ptr       what `ncclEpMemAlloc` gave on this rank
//
// Returns `ncclInvalidArgument` for a dead group or another address; `ncclInvalidUsage` if the ranks free different
// objects, or if an operation of the group was ever captured into a graph, which may use the memory: it then stays
// until the group ends; otherwise as `ncclEpMemAlloc`.
ncclResult_t ncclEpMemFree(ncclEpGroup_t ep_group,
                           void *ptr);

// Makes an object of the caller's memory, as `ncclEpMemAlloc` does of new memory. Collective; `bytes` may differ
// between ranks. Nobody may write to the memory during the call. It remains the caller's, and must live until
// `ncclEpMemDeregister` or the group's end; after a failure of the group, until the other ranks' processes have ended
// or destroyed the group.
//
// The memory must lie in one allocation of `cudaMalloc`, or in at most 100 neighbouring ones of `cuMemCreate` that
// have POSIX file descriptors, such as those of `ncclMemAlloc` and of torch's symmetric memory; the other ranks map
// all of these allocations. Descriptors pass between processes over a socket, so the processes must share a network
// namespace. Other kinds of memory (`cudaMallocAsync`, `cudaMallocManaged`) are refused on all ranks.
//
// @param ep_group     the group
// @param ptr          first byte on this rank, a multiple of 16
// @param bytes        bytes on this rank, not 0
// @param nccl_window  must be NULL
//
// Returns `ncclInvalidArgument` for memory that breaks a rule or overlaps another object of the group; otherwise as
// `ncclEpMemAlloc`.
ncclResult_t ncclEpMemRegister(ncclEpGroup_t ep_group,
                               void *ptr,
                               size_t bytes,
                               void *nccl_window);

// Ends an object of `ncclEpMemRegister`. Collective, and otherwise as `ncclEpMemFree`; the memory remains the
// caller's, and no rank uses it any more. A rank may unmap it later: once its device has no other operations, and no
// graph holds any.
//
// @param ep_group  the group
// @param ptr       what `ncclEpMemRegister` got on this rank
//
// Returns as `ncclEpMemFree`.
ncclResult_t ncclEpMemDeregister(ncclEpGroup_t ep_group,
                                 void *ptr);

// Reports which object of the group the byte at `ptr` is in. Local, enqueues nothing.
//
// @param ep_group  the group
// @param ptr       an address
// @param info      the caller sets its `size`; gets the rest
//
// Returns `ncclInvalidArgument` for a NULL or dead argument, an `info->size` that is too small, or an address in no
// object.
ncclResult_t ncclEpMemInfo(ncclEpGroup_t ep_group,
                           const void *ptr,
                           struct ncclEpMemInfo_t *info);

// Lets `ncclEpPoolAlloc` in the calling thread cut pieces from `bytes` at `ptr`, which nothing else may use. Pieces
// that were cut there before, on any thread, stay. Local, enqueues nothing.
//
// @param ep_group  the group
// @param ptr       in memory of `ncclEpMemAlloc` or `ncclEpMemRegister`, a multiple of 512; NULL: no memory from now
//                  on
// @param bytes     bytes at `ptr`, all in that memory; unchanged while pieces that were cut there are in use
//
// Returns `ncclInvalidArgument` for a NULL or dead group, for bytes that are not in its memory or differ from those
// that pieces in use were cut from, or for a `ptr` that is not a multiple of 512.
ncclResult_t ncclEpPoolUse(ncclEpGroup_t ep_group,
                           void *ptr,
                           size_t bytes);

// Cuts `bytes` from the memory of the calling thread's last `ncclEpPoolUse`. Together with `ncclEpPoolFree`, for
// `torch.cuda.memory.CUDAPluggableAllocator`.
//
// Returns NULL without such memory, or without room there.
void *ncclEpPoolAlloc(size_t bytes,
                      int device,
                      cudaStream_t stream);

// Takes back a piece of `ncclEpPoolAlloc`, on any thread, before or after the group is destroyed.
void ncclEpPoolFree(void *ptr, size_t bytes, int device, cudaStream_t stream);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#ifdef __cplusplus
// C++ callers may leave out trailing arguments.
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wredundant-decls"
#endif
extern "C" {
ncclResult_t ncclEpCreateGroup(ncclEpGroup_t *ep_group,
                               ncclComm_t comm,
                               const ncclEpGroupConfig_t *config,
                               cudaStream_t stream,
                               ncclEpAllocFn_t alloc_fn = nullptr,
                               ncclEpFreeFn_t free_fn = nullptr);
ncclResult_t ncclEpTensorCreate(ncclEpGroup_t ep_group,
                                ncclNDTensor_t *tensor,
                                unsigned int ndim,
                                ncclDataType_t datatype,
                                ncclEpTensorTag_t tag,
                                unsigned int size0,
                                unsigned int size1 = 1,
                                unsigned int size2 = 1,
                                unsigned int size3 = 1,
                                unsigned int size4 = 1);
ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *handle,
                                ncclEpGroup_t ep_group,
                                const ncclNDTensor_t *topk_idx,
                                ncclNDTensor_t *const *local_tensors,
                                unsigned int num_local_tensors,
                                const ncclEpHandleConfig_t *config,
                                cudaStream_t stream,
                                bool use_fp8 = false);
}
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
#endif
