// NCCL EP: expert-parallel dispatch and combine for Mixture-of-Experts models.
//
// Generated from the library's sources by `make header`; do not edit.
//
// Notation: R ranks; E experts, L = E / R of them on each rank; M max_tokens_per_rank; T tokens of this
// rank; K top-k; H hidden size.
//
// Every function returns ncclSuccess, or an error code with a text that ncclEpGetLastError gives.
// Outputs are written on success only. Nothing exits, asserts or throws.
//
// A process that was forked after a group had been made cannot use the library: there functions that
// destroy something do nothing, and all others return ncclInvalidUsage at once.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <nccl.h>

// A version as one number, as `ncclEpGetVersion` counts; NCCL_EP_VERSION_CODE is that of this header:
// #if defined(NCCL_EP_VERSION_CODE) && NCCL_EP_VERSION_CODE >= NCCL_EP_VERSION(0, 1, 0)
#define NCCL_EP_VERSION(major, minor, patch) ((major) * 10000 + (minor) * 100 + (patch))
#define NCCL_EP_VERSION_CODE NCCL_EP_VERSION(NCCL_EP_MAJOR, NCCL_EP_MINOR, NCCL_EP_PATCH)

// The version of this header; `ncclEpGetVersion` gives that of the library.
#define NCCL_EP_MAJOR 0

// See `NCCL_EP_MAJOR`.
#define NCCL_EP_MINOR 1

// See `NCCL_EP_MAJOR`.
#define NCCL_EP_PATCH 0

// This library has `ncclEpGetVersion`; others with this interface may have none.
#define NCCL_EP_HAS_GET_VERSION 1

// It has `ncclEpGetLastError`.
#define NCCL_EP_HAS_GET_LAST_ERROR 1

// It has `ncclEpGetAsyncError`.
#define NCCL_EP_HAS_GET_ASYNC_ERROR 1

// It has `ncclEpSetChoice` and `ncclEpSetSelector`.
#define NCCL_EP_HAS_CHOICES 1

// It has `ncclEpGroupCountRows`.
#define NCCL_EP_HAS_GROUP_COUNT_ROWS 1

// It has `ncclEpGroupTimeWaits`.
#define NCCL_EP_HAS_GROUP_TIME_WAITS 1

// It has `ncclEpGroupTimeCombineWaits`.
#define NCCL_EP_HAS_GROUP_TIME_COMBINE_WAITS 1

// It has `ncclEpMemAlloc` and the other functions of memory that peers map.
#define NCCL_EP_HAS_MEM 1

// It has `ncclEpHandleWaitNumRecvTokens`.
#define NCCL_EP_HAS_HANDLE_WAIT_NUM_RECV_TOKENS 1

// It has `ncclEpHandleOpen` and `ncclEpHandleUpdate`.
#define NCCL_EP_HAS_HANDLE_UPDATE 1

// Let the library choose a value.
#define NCCL_EP_AUTO 0

// How a group moves tokens.
typedef enum ncclEpAlgorithm_t {
  // Low latency (LL): few tokens, 3-D expert-major output, staged operations.
  NCCL_EP_ALGO_LOW_LATENCY = 0,
  // High throughput (HT): many tokens, 2-D output, routing fixed per handle.
  NCCL_EP_ALGO_HIGH_THROUGHPUT = 1,
} ncclEpAlgorithm_t;

// Flags of a tensor; none are defined yet.
typedef enum ncclEpTensorFlags_t {
  // No flags.
  NCCL_EP_TENSOR_FLAG_NONE = 0,
} ncclEpTensorFlags_t;

// What a tensor means in a call. Calls find tensors by tag, in lists of any order. They ignore
// tensors with tags that they do not use, but refuse bad sizes or strides of these, too.
typedef enum ncclEpTensorTag_t {
  // No meaning.
  NCCL_EP_TENSOR_TAG_NONE = 0,
  // Token rows, of any type in a dispatch, and bfloat16, float16 or float32 in a combine; rows
  // are multiples of 16 bytes.
  NCCL_EP_TENSOR_TAG_TOKENS = 1,
  // Top-k expert ids: int64.
  NCCL_EP_TENSOR_TAG_TOPK_IDX = 2,
  // Top-k weights: float32.
  NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS = 3,
  // Scales of token rows, for dispatches: of any type of 1, 2 or 4 bytes, or made by a cast.
  NCCL_EP_TENSOR_TAG_SCALES = 4,
  // Received tokens per local expert, in device memory: int32 `[L]`.
  NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE = 5,
  // Received tokens per local expert, in mapped pinned host memory: int32 `[L]`.
  NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_HOST = 6,
  // Declared for source compatibility; no call reads it.
  NCCL_EP_TENSOR_TAG_TOKENS_PER_EXPERTS = 7,
} ncclEpTensorTag_t;

// An operation that a choice is for.
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
  // The library's own.
  NCCL_EP_VARIANT_AUTO = 0,
  // "ll.reduce", of LL combines: as with NCCL_EP_LL_COMBINE=reduce. Of no effect on rank-major
  // rows, as the next.
  NCCL_EP_VARIANT_LL_REDUCE = 1,
  // "ll.exact", of LL combines: as with NCCL_EP_LL_COMBINE=exact. On one node, where K is at most
  // R, or the group was created with NCCL_EP_LL_COMBINE=exact.
  NCCL_EP_VARIANT_LL_EXACT = 2,
  // "ht.ring", of both HT operations: rows pass through buffers of the library's.
  NCCL_EP_VARIANT_HT_RING = 3,
  // "ht.direct", of HT dispatches: rows are stored in outputs that peers map, if
  // all ranks have such; on one node.
  NCCL_EP_VARIANT_HT_DIRECT = 4,
  // "ht.pull", of HT combines: rows are loaded from inputs that peers map, if all
  // ranks have such; on one node.
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
  // Experts over all ranks, E: a positive multiple of the number of ranks R. Expert `g` lives on
  // rank `g / L` as local expert `g % L`, where L = E / R.
  unsigned int num_experts;
  // Most tokens of one rank, M. `NCCL_EP_AUTO` (HT only): each handle finds its own bound.
  unsigned int max_tokens_per_rank;
  // Largest token row in bytes: hidden size times element size, a multiple of 16.
  unsigned int token_size_bytes;
  // Bytes of network buffers, or `NCCL_EP_AUTO`. Not read: the library finds what it needs.
  unsigned long rdma_buffer_size;
  // Queue pairs per rank, or `NCCL_EP_AUTO`. Not read: NCCL has them.
  unsigned int num_qp_per_rank;
  // Bound of the SMs that a kernel takes, in channels of 2 SMs each, or `NCCL_EP_AUTO`. In LL on
  // one node a kernel may otherwise take every SM while it waits for other ranks; give a number
  // if collectives of yours run beside it on other streams.
  unsigned int num_channels;
} ncclEpGroupConfig_t;

// Allocates `bytes` of device memory, as `cudaMalloc` does. `cudaSuccess` (0) means success.
typedef cudaError_t (*ncclEpAllocFn_t)(void **ptr, size_t bytes);

// Frees what the matching allocator gave, as `cudaFree` does. `cudaSuccess` (0) means success.
typedef cudaError_t (*ncclEpFreeFn_t)(void *ptr);

// A tensor, dense and row-major but for scales. Made by `ncclEpTensorCreate`, or filled in by the
// caller.
typedef struct ncclNDTensor_t {
  // Not read. 1 by convention.
  unsigned int version;
  // Number of dimensions, 1 to 5.
  unsigned int ndim;
  // Extents, slowest dimension first: host array of `ndim`.
  unsigned int *sizes;
  // Host array of `ndim`: NULL, all ones, or row-major strides in elements. All three mean "dense".
  // Tensors of scales may have other strides: see `ncclEpDispatch`.
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

// Options of a handle. Pass NULL where a pointer to this type is wanted.
typedef struct ncclEpHandleConfig *ncclEpHandleConfig_t;

// Options of a dispatch.
typedef struct ncclEpDispatchConfig_t {
  // If not 0, a cast rounds its float32 scales up to powers of two. Must be 0 where scales are
  // forwarded; no effect without scales.
  unsigned int round_scales;
} ncclEpDispatchConfig_t;

// Options of a combine: none are defined yet. Pass NULL or an object set to zero.
typedef struct ncclEpCombineConfig_t {
  // Not read.
  unsigned int reserved;
} ncclEpCombineConfig_t;

// Options of a completion: none are defined yet. Pass NULL or an object set to zero.
typedef struct ncclEpCompleteConfig_t {
  // Not read.
  unsigned int reserved;
} ncclEpCompleteConfig_t;

// How to run an operation. Fields that are 0 leave it to the library.
typedef struct ncclEpChoice_t {
  // Bytes of this structure.
  unsigned int size;
  // An `ncclEpVariant_t`.
  unsigned int variant;
  // Blocks of the kernel, each on an SM: within the bound of the group and of its GPU.
  unsigned int blocks;
  // How many of them send, at most `blocks`; in LL all do everything if both are equal.
  unsigned int send_blocks;
  // Threads of a block, a multiple of 32 up to 1024; a kernel that has fewer at most takes those.
  unsigned int threads;
  // Not 0: the kernel is not launched while the one before it on its stream runs, as those of LL on one node are.
  unsigned int in_order;
} ncclEpChoice_t;

// What a selector is told of an operation.
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
  // The most SMs that the operation may take, one for each block; 0 if nothing bounds it, on the CPU.
  unsigned int sms;
  // Not 0 if peers map TOKENS that a dispatch delivers, or a combine takes: memory of
  // `ncclEpMemAlloc` or `ncclEpMemRegister`.
  unsigned int symmetric;
} ncclEpQuery_t;

// Chooses how to run an operation: writes to `choice`, whose fields are 0 but for its size, and
// returns not 0; or returns 0, for none.
typedef int (*ncclEpSelect_t)(void *user,
                              const struct ncclEpQuery_t *query,
                              struct ncclEpChoice_t *choice);

// What `ncclEpMemInfo` tells. Later versions may have more at its end.
typedef struct ncclEpMemInfo_t {
  // Bytes of the structure, set by the caller.
  size_t size;
  // The object's number, 0 to 63, the same on all ranks; free numbers serve again.
  unsigned int object;
  // How many other ranks map this rank's memory of the object, and this rank theirs: those of its
  // node.
  unsigned int peers;
  // Of the address in question, in this rank's memory of the object.
  size_t offset;
  // Bytes of this rank's memory of the object.
  size_t bytes;
  // Host array of R addresses: where this rank sees the memory of each rank. NULL for ranks of
  // other nodes. It lives as long as the object.
  void *const *peer_data;
  // How many tensors of operations were found in the object.
  unsigned long tensors;
  // How many were found in none since the group has had one, whose rows are copied as ever. Those
  // that could have gone another way count: rows that a dispatch delivers or a combine takes, in
  // HT.
  unsigned long plain_tensors;
  // How many HT operations of the group had their tensor in memory that peers map, and passed
  // their rows through the library's buffers all the same, as that of another rank was in none;
  // on GPUs. A `size` of 56 bytes has no such field.
  unsigned long fallbacks;
} ncclEpMemInfo_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Creates a group over all ranks of `comm`. Collective: every rank calls it with the same
// `config`, and either all ranks get a group or all get an error. Blocks the host.
//
// @param ep_group  gets the group; written on success only
// @param comm      communicator whose ranks form the group; must outlive the group
// @param config    see `ncclEpGroupConfig_t`
// @param stream    stream for the exchanges of the creation; NULL is the default stream
// @param alloc_fn  allocates the data of `ncclEpTensorCreate`; NULL means `cudaMalloc`
// @param free_fn   frees that data; NULL means `cudaFree`, see `ncclEpTensorDestroy`
//
// Returns `ncclInvalidArgument` for a NULL pointer, or a `config` that breaks a rule or differs
// between ranks; `ncclInvalidUsage` if `stream` is captured into a graph, which goes on, or if the
// ranks span several nodes and this process's NCCL cannot connect them; `ncclRemoteError` if
// another rank refused or did not arrive within NCCL_EP_TIMEOUT_MS; `ncclSystemError` if the
// process has no NCCL; `ncclUnhandledCudaError` without a usable GPU; or the code of an NCCL call
// that failed.
ncclResult_t ncclEpCreateGroup(ncclEpGroup_t *ep_group,
                               ncclComm_t comm,
                               const struct ncclEpGroupConfig_t *config,
                               cudaStream_t stream,
                               ncclEpAllocFn_t alloc_fn,
                               ncclEpFreeFn_t free_fn);

// Destroys a group. Collective: every rank of the group calls it, before its communicator is
// destroyed. Waits for the group's operations on all ranks, and for nothing else. Launches of
// graphs with operations of the group must have ended, or be on `stream`. NULL is a successful
// no-op.
//
// Destroy the handles of the group first: later calls on them are refused. Tensors of the group
// stay valid and may be destroyed afterwards. Memory of `ncclEpMemAlloc` that is left is freed.
//
// @param ep_group  the group
// @param stream    stream for the closing exchange; NULL is the default stream
//
// Returns `ncclInvalidArgument` for a group that was destroyed already; `ncclInvalidUsage` if
// `stream` is captured into a graph: the capture and the group go on. Captures of other streams go
// on, too, unless graphs have operations of the group: then this call waits for its whole device,
// which ends all captures there. `ncclRemoteError` where other ranks do not come within
// NCCL_EP_TIMEOUT_MS, or operations have not ended within twice that, as what is before them on
// their stream does not end: the group is gone, and its memory stays allocated.
ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t ep_group, cudaStream_t stream);

// Allocates a dense tensor in device memory and fills in its descriptor. Local. The data is not
// initialised. While a stream is captured into a graph this works as ever, outside of the graph,
// and `alloc_fn` may call `cudaMalloc`; `ncclEpTensorDestroy` and `free_fn` likewise.
//
// @param ep_group  group whose `alloc_fn` allocates the data
// @param tensor    gets the descriptor; written on success only
// @param ndim      1 to 5
// @param datatype  element type
// @param tag       what the tensor means; may be changed in the descriptor later
// @param size0     extent of the slowest dimension; `size1` to `size4` follow, those beyond `ndim`
//                  are ignored
//
// Returns `ncclInvalidArgument` for a NULL or dead group, a NULL `tensor`, a bad `ndim`, an
// unknown `datatype` or a size beyond the address space; `ncclSystemError` if `alloc_fn` fails;
// `ncclUnhandledCudaError` if the device has no memory left.
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

// Frees the data and the arrays of a descriptor and sets their pointers to NULL, so that a second
// call is harmless. Local. NULL is a successful no-op.
//
// Data that `ncclEpTensorCreate` made is freed by the counterpart of its allocator, even after
// the group was destroyed. Other data is freed by the `free_fn` of `ep_group`, or kept if
// `ep_group` is NULL. `free()` releases the arrays. `cudaFree`, which frees data where no
// `free_fn` was given, waits for the device: while an exchange or operation of this library runs
// or is stuck there, or a graph has one (on one node: or a living group was captured), the data
// stays allocated until a later call. Of 256 such allocations, or 256 MiB that wait for graphs
// alone, the oldest are freed without waiting: what uses the data must be over.
//
// @param ep_group  the tensor's group, alive or destroyed, or NULL
// @param tensor    the descriptor
//
// Returns `ncclSystemError` or `ncclUnhandledCudaError` if freeing the data fails.
ncclResult_t ncclEpTensorDestroy(ncclEpGroup_t ep_group, struct ncclNDTensor_t *tensor);

// Creates a handle: one routing of this rank's tokens to experts.
//
// LL on one node: local, enqueues nothing. Over several nodes: collective, in one order on all
// ranks; the ranks exchange T and K on a stream of the library's own, behind the group's earlier
// operations, and the first operation waits on the host if that has not arrived, at most twice
// NCCL_EP_TIMEOUT_MS. If a rank refuses its own, ranks that forward for it refuse operations on
// theirs (`ncclRemoteError`), and the group goes on: all make another one. In either case every
// dispatch and combine reads the ids again, so they may be updated in place between operations; a
// combine finds the rows of the last dispatch by them. The data of the ids must stay valid as long
// as the handle is used, the descriptor need not.
//
// HT: collective. The ranks exchange the routing, and the ids are read once, when `stream`
// reaches this call. On the GPUs of one node the host does not wait for that; over several nodes
// it does, as sizes of messages depend on it. If what `stream` has been given before takes longer
// than twice NCCL_EP_TIMEOUT_MS then, the group fails.
//
// While a stream is captured into a graph, LL handles can be made as ever, and are no part of the
// graph. HT refuses a captured `stream`.
//
// @param handle            gets the handle; written on success only
// @param ep_group          the group
// @param topk_idx          TOPK_IDX, int64 [T, K]: expert ids of this rank's T tokens. T is at
//                          most max_tokens_per_rank, may differ between ranks and may be 0. K is
//                          at most 32 and the same on every rank. Negative ids and ids of E or
//                          more are ignored.
// @param local_tensors     HT: optional RECV_EXPERT_COUNTER_HOST or RECV_EXPERT_COUNTER_DEVICE,
//                          int32 `[L]` or longer: gets the received tokens per local expert,
//                          valid once `stream` is synchronised. LL: none.
// @param num_local_tensors number of local tensors
// @param config            must be NULL
// @param stream            stream that orders the exchange; NULL is the default stream
// @param use_fp8           no effect
//
// Returns `ncclInvalidArgument` for a NULL or dead argument or a tensor that breaks a rule, and
// the code of the failure if the group has failed. HT: `ncclInvalidUsage` if `stream` is captured;
// `ncclRemoteError` or `ncclInvalidArgument`
// if another rank refused or has another K. On the CPU backend and over several nodes this call
// returns these two; on the GPUs of one node the calls on the handle do, once the exchange has run.
ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *handle,
                                ncclEpGroup_t ep_group,
                                const struct ncclNDTensor_t *topk_idx,
                                struct ncclNDTensor_t *const *local_tensors,
                                unsigned int num_local_tensors,
                                const ncclEpHandleConfig_t *config,
                                cudaStream_t stream,
                                bool use_fp8);

// Opens a handle without a routing, which `ncclEpHandleUpdate` gives it. Local, enqueues nothing.
//
// In HT it keeps the ids of its update. So a dispatch is a forward one if it has inputs TOPK_WEIGHTS; TOPK_IDX is not
// read there. A combine gives gradients of weights [T, K] by k: those of the expert that each id names, 0 for others.
//
// HT with `expert_alignment`: rows lie by expert, one for each expert that a token names. A forward dispatch has
// outputs TOKENS [n, H] and TOPK_WEIGHTS float32 `[n]`, and no TOPK_IDX. Rows are ordered by expert, source rank and
// token; those of an expert begin at a multiple of the alignment, with zeros behind the last. Behind all of them
// TOKENS and SCALES, `[n, S]`, keep their content, and weights are 0. Scales are forwarded; a cast is refused. A
// combine has inputs TOKENS [n, H], to which the caller has applied the weights: each rank sums a token's rows by
// ascending expert and rounds that sum. Gradients are TOPK_WEIGHTS `[n]`. `ncclEpHandleGetNumRecvTokens` gives the
// most rows that an update may bring.
//
// @param handle            gets the handle; written on success only
// @param ep_group          the group
// @param expert_alignment  0, or a power of two: HT, in a group with max_tokens_per_rank, at most 1,048,576 tokens on
//                          all ranks together. So small that what may come to a rank, by expert and filled up, is
//                          countable in 31 bits
//
// Returns `ncclInvalidArgument` for a NULL or dead argument or another alignment.
ncclResult_t ncclEpHandleOpen(ncclEpHandle_t *handle,
                              ncclEpGroup_t ep_group,
                              unsigned int expert_alignment);

// Gives a handle a routing, in the place of the one that it may have. As `ncclEpCreateHandle` in what it reads, writes
// and waits for, and as collective.
//
// HT on the GPUs of one node: `stream` may be captured into a graph, with a handle of `ncclEpHandleOpen`. Each replay
// then routes by the ids that are there, and writes the counter. What is enqueued on the handle belongs into the same
// graph, and needs rows for any routing, as nobody waits for the number of those that come.
//
// @param handle            the handle
// @param topk_idx          as of `ncclEpCreateHandle`; with a handle of `ncclEpHandleOpen` also int32
// @param local_tensors     as of `ncclEpCreateHandle`; where rows lie by expert they are counted as they come, without
//                          what fills up
// @param num_local_tensors number of local tensors
// @param stream            stream that orders the exchange; NULL is the default stream
//
// Returns as `ncclEpCreateHandle`, `ncclInvalidUsage` while a staged operation waits for completion. After a refusal
// this rank's routing is what it was.
ncclResult_t ncclEpHandleUpdate(ncclEpHandle_t handle,
                                const struct ncclNDTensor_t *topk_idx,
                                struct ncclNDTensor_t *const *local_tensors,
                                unsigned int num_local_tensors,
                                cudaStream_t stream);

// Destroys a handle. Local. Gives up a staged operation that was not completed. Does not touch
// the tensor of the ids. NULL is a successful no-op.
//
// Returns `ncclInvalidArgument` for a handle that was destroyed already.
ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle);

// Gets the number of rows that an HT dispatch of this handle can deliver to this rank: R *
// max_tokens_per_rank, or the real count if the group's max_tokens_per_rank is NCCL_EP_AUTO. Where
// rows lie by expert, those that any update with its K may bring, filled up. Local. The real count is
// known only once the stream of the handle's creation has reached that call; this call waits for it.
//
// @param handle          an HT handle
// @param num_recv_tokens gets the number of rows
//
// Returns `ncclInvalidArgument` for a NULL or dead argument, `ncclInvalidUsage` for an LL handle;
// with NCCL_EP_AUTO also the error of an exchange for which the creation did not wait.
ncclResult_t ncclEpHandleGetNumRecvTokens(ncclEpHandle_t handle,
                                          unsigned int *num_recv_tokens);

// As `ncclEpHandleGetNumRecvTokens`, but waits at most that long: so a program can look at other things, such as
// signals, and call again. The deadline of the wait counts from the first of these calls.
//
// @param handle          an HT handle
// @param timeout_ms      milliseconds; 0 looks without waiting
// @param num_recv_tokens gets the number of rows
//
// Returns `ncclInProgress` if the number is not known yet; `num_recv_tokens` is as before then, and it is no failure.
// All else as `ncclEpHandleGetNumRecvTokens`.
ncclResult_t ncclEpHandleWaitNumRecvTokens(ncclEpHandle_t handle,
                                           unsigned int timeout_ms,
                                           unsigned int *num_recv_tokens);

// Sends each token to the ranks that host its experts. Every rank of the group calls it, in the
// same order of operations. Enqueued on `stream`; the host does not wait, except in the first
// operation of an LL handle over several nodes, if the other nodes have not made theirs.
//
// Operations of a group run one after the other in the order of the calls, whatever their
// streams. The caller orders the launches of graphs, among each other and with other operations.
// A handle must outlive the graphs that hold its operations. At most four captures with
// operations of a group may take turns. A staged operation takes one of two slots of its group,
// in a graph when it is captured. Do not launch such a graph while a staged operation that was
// sent outside of it after the capture waits for `ncclEpComplete`: both may wait until the
// deadline.
//
// With R ranks, L local experts, M max_tokens_per_rank, T this rank's tokens, K top-k, H hidden
// size; rows are of any type, a multiple of 16 bytes and, with their scales, at most
// token_size_bytes:
//
// LL: inputs TOKENS [T, H]; outputs TOKENS [L, R*M, H]; local_tensors optional
// RECV_EXPERT_COUNTER_DEVICE int32 `[L]`. The rows of each expert are packed from slot 0, by
// source rank, token, k. The counter gets their number. Other slots keep their content. An expert
// that a token names more than once takes a slot each time. If repeated ids leave it fewer than
// R*M for all its rows, the group fails, with a text that names the expert and a rank.
//
// LL rank-major, where outputs have TOPK_IDX: inputs TOKENS [T, H], TOPK_WEIGHTS float32 [T, K]; outputs TOKENS
// [R, M, H], TOPK_IDX int64 [R, M, K], TOPK_WEIGHTS float32 [R, M, K]; local_tensors optional
// RECV_EXPERT_COUNTER_DEVICE int32 `[R]`. A rank receives a token once, whatever number of its experts the token
// names. The rows of each source rank are packed from row 0, by token; the counter gets their number. Entry k of a
// row's ids is the local id of the token's expert k if that is here, else -1; all ids of other rows are -1. A row has
// all K weights of its token. Rows and weights of other rows keep their content.
// If the data of outputs TOKENS is NULL, on every rank then, rows stay in memory of the library, a view, and its
// address is stored there. Rows that hold nothing have any content, and must not be written. The view lives until the
// handle's next combine begins, which may read it, or until the second dispatch of the group with a view after this
// one begins, if that is earlier; in graphs it has the same address in each replay. Nobody but the stream's order says
// when.
//
// HT forward: inputs TOKENS [T, H], TOPK_IDX int64 [T, K], TOPK_WEIGHTS float32 [T, K]; outputs
// TOKENS [n, H], TOPK_IDX [n, K], TOPK_WEIGHTS [n, K], where n is at least the number of received
// tokens. A rank receives a token once; rows are ordered by source rank and token. The ids of a
// row are local expert ids, ascending, then -1; its weights are in the same order, then 0. An
// expert that a token names more than once is there once, with the sum of its weights, in fp32 by
// ascending k. Unused rows are 0, -1 and 0.
// HT tokens only (cached, or the backward of a combine): inputs and outputs TOKENS.
// In both, local_tensors may hold RECV_EXPERT_COUNTER_DEVICE int32 `[L]`.
//
// Scales, in all: outputs SCALES [L, R*M, S] (LL), [R, M, S] (rank-major) or [n, S] (HT); unused rows as those of
// TOKENS. With inputs SCALES [T, S], of a type of 1, 2 or 4 bytes, rows and scales arrive as they
// are. Without, the dispatch casts: TOKENS are bfloat16, float16 or float32 and arrive as
// float8e4m3, declared as that, uint8 or int8. The type and S of outputs SCALES choose the cast:
// float32, one for 128 elements; uint8 (UE8M0), one for 128 or for 32; int32 or uint32, four UE8M0
// in each. A row with its scales, padded to 16 bytes, must fit token_size_bytes. SCALES may have
// strides: row-major (.., P, 1), P at least S, or column-major (.., 1, P), P at least the rows;
// experts are at least P times the other extent apart. docs/formats.md has the formulas.
//
// @param handle            the routing
// @param inputs            tensors that are read
// @param num_inputs        their number
// @param outputs           tensors that are written
// @param num_outputs       their number
// @param local_tensors     tensors of this rank alone
// @param num_local_tensors their number
// @param send_only         LL: if not 0, only send now; `ncclEpComplete` receives. The same on
//                          every rank. HT: no effect
// @param config            may be NULL
// @param stream            stream to run on; NULL is the default stream
//
// Returns `ncclInvalidArgument` for a NULL or dead argument or a tensor that is missing or breaks
// a rule; `ncclInvalidUsage` for a handle whose group was destroyed, while a staged operation of
// the handle waits for completion, or for a third staged operation of the group; HT on the GPUs of
// one node: `ncclRemoteError` or `ncclInvalidArgument` once it is known that another rank refused
// the handle, or has another K; the code of the failure if the group has failed.
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

// Sends the experts' results back to the tokens' home ranks, summed in fp32 in an order that is
// always the same. Every rank of the group calls it, in the same order of operations. Enqueued on
// `stream`; the host does not wait, except as in `ncclEpDispatch`.
//
// LL: inputs TOKENS [L, R*M, H], rows where dispatch put their tokens; local_tensors TOPK_WEIGHTS
// float32 [T, K]; outputs TOKENS [T, H]: for each token the weighted sum over its experts. A rank
// that hosts several experts of a token sums their rows by ascending k, as dispatched, rounds the
// sum and sends that; on one node the home rank sums by ascending rank. With
// NCCL_EP_LL_COMBINE=exact, on one node only, the home rank sums all rows, by ascending k of the
// combine, and nothing is rounded in between.
//
// LL after a rank-major dispatch of the handle: inputs TOKENS [R, M, H], in each row of a token what this rank's
// experts give for it, weighed and summed by the caller; no weights; outputs TOKENS [T, H]: for each token the sum of
// the rows of its ranks, in the order of the first k that names each, in either mode. The ids of the dispatch count.
//
// LL else reads the ids again and finds the rows by them, so (id, weight) pairs of a token may be
// permuted in place between a dispatch and its combine. If a token names an expert more than
// once, the m-th entry means the m-th that was dispatched to it; if there are more of them than
// were dispatched, the weights of the surplus entries count for the last. An id that was masked
// (made negative) since the dispatch, or that was not dispatched, is ignored.
//
// HT forward: inputs TOKENS [n, H], in dispatch's order, where the caller has applied the weights
// and summed the local experts of each token; outputs TOKENS [T, H]: the sum over ranks, on one
// node ascending.
// HT backward: also inputs TOPK_WEIGHTS float32 [n, K], packed as dispatch delivers weights;
// outputs TOPK_WEIGHTS [T, K]: by ascending global expert id, then zeros. An expert that a token
// names more than once has one column, the gradient of the sum, which is that of each such entry.
//
// Over several nodes both modes sum node by node: another node's sum is rounded once, since it
// travels as a row. So the last bits of a token depend on the node of its home, unless
// NCCL_EP_NODE_SUMS=invariant. docs/several-nodes.md has the order of nodes.
//
// A token to which no expert contributes gets zeros.
//
// @param handle            the routing; LL: after a dispatch on it. A captured dispatch must have been
//                          replayed before
// @param inputs            tensors that are read
// @param num_inputs        their number
// @param outputs           tensors that are written
// @param num_outputs       their number
// @param local_tensors     tensors of this rank alone
// @param num_local_tensors their number
// @param send_only         LL: if not 0, only send now; `ncclEpComplete` receives. The same on
//                          every rank. HT: no effect
// @param config            may be NULL
// @param stream            stream to run on; NULL is the default stream
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

// Enqueues the receive phase of the handle's staged operation on `stream`. It runs after the send
// phase, even if that was enqueued on another stream. A successful no-op if nothing is staged,
// and in HT.
//
// Two staged operations of a group may be pending at once. Before a third is sent, all ranks
// complete the same one of them, or destroy its handle. A refused call changes nothing, so it may
// be repeated.
//
// @param handle  the handle
// @param config  may be NULL
// @param stream  stream to run on; NULL is the default stream
//
// Returns `ncclInvalidArgument` for a NULL or dead handle; `ncclInvalidUsage` for a handle whose
// group was destroyed, or if `stream` is not captured into the same graph as the send phase; or
// the code of the failure if the group has failed.
ncclResult_t ncclEpComplete(ncclEpHandle_t handle,
                            const struct ncclEpCompleteConfig_t *config,
                            cudaStream_t stream);

// Gets the library's version: MAJOR * 10000 + MINOR * 100 + PATCH.
//
// Returns `ncclInvalidArgument` if `version` is NULL.
ncclResult_t ncclEpGetVersion(int *version);

// Returns one line that explains the last refusal of this library in the calling thread:
// function, argument, rule, got and expected. Empty if nothing was refused yet; never NULL. Valid
// until the next refusal in the same thread.
const char *ncclEpGetLastError(void);

// Reports whether an operation of `ep_group` failed while it ran, as `ncclCommGetAsyncError` does
// for NCCL.
//
// Writes `ncclSuccess`, or the code of the first failure, to `*result`; `ncclEpGetLastError` then
// returns the text of the failure. A failed group refuses further operations; destroy it.
//
// Returns `ncclInvalidArgument` for a NULL or dead `ep_group` or a NULL `result`.
ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t ep_group, ncclResult_t *result);

// Chooses how this rank runs each `operation` of a group that is called from now on: a variant, a
// launch shape, or both. A choice that is set comes before the selector, that before the file
// NCCL_EP_TUNING_FILE, and that before the library's own rule. A choice that is impossible in a call
// counts as none there, but a launch shape that does not fit leaves its variant; with
// NCCL_DEBUG=WARN one line of each kind says why. The choice is made in the call, so replays of a
// graph keep it. It is copied.
//
// Variants of LL change the last bits of results and must be the same on every rank: else the
// operation fails on all, with a text. Whether one is possible depends on what all ranks have alike.
// All else is a matter of each rank, and changes no bit.
//
// @param ep_group   the group
// @param operation  an `ncclEpOperation_t`; one of the other algorithm has no effect
// @param choice     NULL: chosen no longer
//
// Returns `ncclInvalidArgument` for a dead group, an unknown operation, or a `choice->size` that is
// not the size of the structure.
ncclResult_t ncclEpSetChoice(ncclEpGroup_t ep_group,
                             unsigned int operation,
                             const struct ncclEpChoice_t *choice);

// Lets `select` choose, in each operation of this rank for which no choice is set. It is called by
// the thread that calls the operation, in that call: it should take a fraction of a microsecond, and
// must not wait for other ranks, throw, or call the library for this group. Threads that call
// operations at the same time call it at the same time. It may be asked for an operation that is
// then refused.
//
// What it chooses counts as with `ncclEpSetChoice`. Do not replace it while another thread is in an
// operation of the group, which may still call the one before.
//
// @param ep_group  the group
// @param select    NULL: nobody is asked
// @param user      is passed to `select`
//
// Returns `ncclInvalidArgument` for a dead group.
ncclResult_t ncclEpSetSelector(ncclEpGroup_t ep_group,
                               ncclEpSelect_t select,
                               void *user);

// Counts the rows that each local expert receives: from now on every dispatch of the group adds them to
// `rows_of_expert`, behind itself on its stream, in a staged one behind `ncclEpComplete`. In LL those dispatches count
// that deliver rows by expert and have a RECV_EXPERT_COUNTER_DEVICE; in HT all.
//
// A small kernel of its own adds, also in graphs that are captured from now on, which keep the address. Local: ranks
// may differ.
//
// @param ep_group        the group
// @param rows_of_expert  int64 `[L]` on the device, which the caller has set to zero, reads and clears at will on a
//                        stream behind the dispatches, and keeps until they have ended; NULL counts no more
//
// Returns `ncclInvalidArgument` for a NULL or dead `ep_group`, or a `rows_of_expert` that is not a multiple of 8;
// the failure's code in a group that has failed.
ncclResult_t ncclEpGroupCountRows(ncclEpGroup_t ep_group,
                                  int64_t *rows_of_expert);

// Times how long this rank waits for each other: from now on every LL dispatch of the group adds the nanoseconds from
// when it is ready to receive until a source rank has told how many rows come from there; a staged one does so in
// `ncclEpComplete`. So what a rank's dispatch begins later than this one's is found under its number.
//
// The kernel itself adds, also in graphs that are captured from now on, which keep the address. Waits overlap, so
// their sum means nothing. Over several nodes those for the network's messages come before, and are not among them.
// Local: ranks may differ. HT dispatches are not timed.
//
// @param ep_group         the group
// @param ns_of_source     int64 `[R]` on the device, as `rows_of_expert` of `ncclEpGroupCountRows`; NULL times no more
//
// Returns `ncclInvalidArgument` for a NULL or dead `ep_group`, or an `ns_of_source` that is not a multiple of 8; the
// failure's code in a group that has failed.
ncclResult_t ncclEpGroupTimeWaits(ncclEpGroup_t ep_group,
                                  int64_t *ns_of_source);

// The same for combines, LL and HT: from now on each adds the nanoseconds from when it has told the others what they
// need until a rank has begun it, too; in HT until the first row comes from there, or the rank tells where its rows
// lie. A staged one does so in both phases: where it waits for weights as it sends, it waits for all ranks then. Over
// several nodes HT times the ranks of its node.
//
// All else is as of `ncclEpGroupTimeWaits`.
//
// @param ep_group         the group
// @param ns_of_source     int64 `[R]` on the device, also that of `ncclEpGroupTimeWaits`; NULL times no more
//
// Returns as `ncclEpGroupTimeWaits`.
ncclResult_t ncclEpGroupTimeCombineWaits(ncclEpGroup_t ep_group,
                                         int64_t *ns_of_source);

// Allocates `bytes` of device memory that all ranks of the same node map: an object of the group.
// Collective, in one order with the group's other memory calls on all ranks; either all ranks get
// memory or all get an error. `bytes` may differ between ranks. Blocks the host, and enqueues
// nothing on streams of the caller.
//
// A tensor whose rows lie wholly in such memory, at a multiple of 16 bytes, is recognised by its
// address in each operation, whatever the other ranks pass: then rows need not be copied where
// both ends can do without. Offsets may differ between ranks. Results are the same as with any
// other memory.
//
// The content is arbitrary at first. What is not freed before ends with the group.
//
// @param ep_group  the group
// @param ptr       gets the address on this rank; written on success only
// @param bytes     bytes on this rank, not 0
//
// Returns `ncclInvalidArgument` for a NULL or dead argument or 0 bytes; `ncclInvalidUsage` if the
// group has 64 objects, if the default stream is captured into a graph or waits for a stream that
// is, or if another rank makes another call; `ncclUnhandledCudaError` without memory;
// `ncclRemoteError` if another rank refused, or did not arrive within NCCL_EP_TIMEOUT_MS: then the
// group has failed; and the code of the failure if the group had failed before.
ncclResult_t ncclEpMemAlloc(ncclEpGroup_t ep_group, void **ptr, size_t bytes);

// Frees the memory of one `ncclEpMemAlloc`. Collective, with the memory of the same object on all
// ranks. Waits until the group's operations have run; other work of the caller's must not use the
// memory any more. If a rank does not arrive, or fails, the memory stays allocated, as that rank
// might still write there.
//
// @param ep_group  the group
// @param ptr       what `ncclEpMemAlloc` gave on this rank
//
// Returns `ncclInvalidArgument` for a dead group or another address; `ncclInvalidUsage` if the
// ranks free memory of different objects, or once an operation of the group was captured into a
// graph, which may use the memory: it stays until the group ends; and otherwise as
// `ncclEpMemAlloc`.
ncclResult_t ncclEpMemFree(ncclEpGroup_t ep_group, void *ptr);

// Makes an object of the caller's memory, as `ncclEpMemAlloc` does of new memory. Collective;
// `bytes` may differ between ranks. The memory is the caller's as before, and must live until
// `ncclEpMemDeregister` or the group's end; after a failure of the group until the other ranks'
// processes have ended or destroyed the group.
//
// It must be in one allocation of `cudaMalloc`, or in at most 100 neighbouring ones of `cuMemCreate`
// that have POSIX file descriptors, as those of `ncclMemAlloc` and of torch's symmetric memory; the
// other ranks map all of these. Between processes descriptors go over a socket of the system's, so
// these share a network namespace. Memory of other kinds (`cudaMallocAsync`, `cudaMallocManaged`)
// is refused on all ranks. Nobody may write there during the call.
//
// @param ep_group     the group
// @param ptr          first byte on this rank, a multiple of 16
// @param bytes        bytes on this rank, not 0
// @param nccl_window  must be NULL
//
// Returns `ncclInvalidArgument` for memory that breaks a rule, or has bytes in common with memory
// of another object of the group; and otherwise as `ncclEpMemAlloc`.
ncclResult_t ncclEpMemRegister(ncclEpGroup_t ep_group,
                               void *ptr,
                               size_t bytes,
                               void *nccl_window);

// Ends the object of one `ncclEpMemRegister`. Collective, and otherwise as `ncclEpMemFree`; the
// memory stays the caller's, and no rank maps it any more.
//
// @param ep_group  the group
// @param ptr       what `ncclEpMemRegister` got on this rank
//
// Returns as `ncclEpMemFree`.
ncclResult_t ncclEpMemDeregister(ncclEpGroup_t ep_group, void *ptr);

// Tells which object of the group the byte at `ptr` is in. Local, and enqueues nothing.
//
// @param ep_group  the group
// @param ptr       an address
// @param info      its `size` is set by the caller; gets the rest
//
// Returns `ncclInvalidArgument` for a NULL or dead argument, an `info->size` that is too small, or
// an address in no object.
ncclResult_t ncclEpMemInfo(ncclEpGroup_t ep_group, const void *ptr, struct ncclEpMemInfo_t *info);

// Lets `ncclEpPoolAlloc` of the calling thread cut from `bytes` at `ptr`, which nothing else uses.
// What was cut there before, on any thread, stays. Local, and enqueues nothing.
//
// @param ep_group  the group
// @param ptr       in memory of `ncclEpMemAlloc` or `ncclEpMemRegister`, a multiple of 512; NULL:
//                  no memory from now on
// @param bytes     how many, wholly there; as before while pieces that were cut there are in use
//
// Returns `ncclInvalidArgument` for a NULL or dead group, for bytes that are not in its memory, for
// others than those from which pieces in use were cut, or a `ptr` that is no such multiple.
ncclResult_t ncclEpPoolUse(ncclEpGroup_t ep_group, void *ptr, size_t bytes);

// Cuts `bytes` from the memory of the calling thread's last `ncclEpPoolUse`. With `ncclEpPoolFree`
// for `torch.cuda.memory.CUDAPluggableAllocator`.
//
// Returns NULL if it has no such memory, or no room there.
void *ncclEpPoolAlloc(size_t bytes, int device, cudaStream_t stream);

// Takes back what `ncclEpPoolAlloc` has cut, on any thread, before or after the group is destroyed.
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
