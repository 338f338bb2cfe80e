// What the compiler can check of the ABI, in C and in C++: the layout of every struct, the value of every
// constant and the type of every function. Programs built against the first release rely on all of
// them; docs/abi.md lists the numbers. scripts/testing/abi_checks.py checks what the linker sees.
#pragma once

#include <assert.h>
#include <stdalign.h>

#include "harness/harness.h"

#ifdef __cplusplus
#include <type_traits>
#define SAME(expression, type) std::is_same_v<decltype(expression), type>
#define PLAIN(type) (std::is_standard_layout_v<type> && std::is_trivially_copyable_v<type>)
#else
#define SAME(expression, type) _Generic((expression), type: 1, default: 0)
#define PLAIN(type) true
#endif

#define LAYOUT(owner, bytes, alignment)                         \
    static_assert(PLAIN(owner), #owner " is plain");            \
    static_assert(sizeof(owner) == (bytes), "size of " #owner); \
    static_assert(alignof(owner) == (alignment), "alignment of " #owner)
#define FIELD(owner, field, at, type)                                              \
    static_assert(offsetof(owner, field) == (at), "offset of " #owner "." #field); \
    static_assert(SAME(&((owner*)0)->field, type*), "type of " #owner "." #field)
#define VALUE(name, value) static_assert((name) == (value), "value of " #name)
#define FUNCTION(name, result, ...) static_assert(SAME(&(name), result(*)(__VA_ARGS__)), "type of " #name)

// ---- Structs: size, alignment, and offset and type of each field -------------------------------

LAYOUT(ncclNDTensor_t, 48, 8);
FIELD(ncclNDTensor_t, version, 0, unsigned);
FIELD(ncclNDTensor_t, ndim, 4, unsigned);
FIELD(ncclNDTensor_t, sizes, 8, unsigned*);
FIELD(ncclNDTensor_t, strides, 16, unsigned*);
FIELD(ncclNDTensor_t, datatype, 24, ncclDataType_t);
FIELD(ncclNDTensor_t, data, 32, void*);
FIELD(ncclNDTensor_t, tag, 40, unsigned);
FIELD(ncclNDTensor_t, flags, 44, ncclEpTensorFlags_t);

LAYOUT(ncclEpGroupConfig_t, 40, 8);
FIELD(ncclEpGroupConfig_t, version, 0, unsigned);
FIELD(ncclEpGroupConfig_t, algorithm, 4, ncclEpAlgorithm_t);
FIELD(ncclEpGroupConfig_t, num_experts, 8, unsigned);
FIELD(ncclEpGroupConfig_t, max_tokens_per_rank, 12, unsigned);
FIELD(ncclEpGroupConfig_t, token_size_bytes, 16, unsigned);
FIELD(ncclEpGroupConfig_t, rdma_buffer_size, 24, unsigned long);
FIELD(ncclEpGroupConfig_t, num_qp_per_rank, 32, unsigned);
FIELD(ncclEpGroupConfig_t, num_channels, 36, unsigned);

LAYOUT(ncclEpDispatchConfig_t, 4, 4);
FIELD(ncclEpDispatchConfig_t, round_scales, 0, unsigned);

// Incomplete in the first release; complete here, so that programs can declare an object.
LAYOUT(ncclEpCombineConfig_t, 4, 4);
FIELD(ncclEpCombineConfig_t, reserved, 0, unsigned);
LAYOUT(ncclEpCompleteConfig_t, 4, 4);
FIELD(ncclEpCompleteConfig_t, reserved, 0, unsigned);

LAYOUT(ncclEpQuery_t, 32, 4);
FIELD(ncclEpQuery_t, size, 0, unsigned);
FIELD(ncclEpQuery_t, operation, 4, unsigned);
FIELD(ncclEpQuery_t, tokens, 8, unsigned);
FIELD(ncclEpQuery_t, top_k, 12, unsigned);
FIELD(ncclEpQuery_t, row_bytes, 16, unsigned);
FIELD(ncclEpQuery_t, ranks, 20, unsigned);
FIELD(ncclEpQuery_t, sms, 24, unsigned);
FIELD(ncclEpQuery_t, symmetric, 28, unsigned);

LAYOUT(ncclEpChoice_t, 24, 4);
FIELD(ncclEpChoice_t, size, 0, unsigned);
FIELD(ncclEpChoice_t, variant, 4, unsigned);
FIELD(ncclEpChoice_t, blocks, 8, unsigned);
FIELD(ncclEpChoice_t, send_blocks, 12, unsigned);
FIELD(ncclEpChoice_t, threads, 16, unsigned);
FIELD(ncclEpChoice_t, in_order, 20, unsigned);
LAYOUT(ncclEpMemInfo_t, 64, 8);
FIELD(ncclEpMemInfo_t, size, 0, size_t);
FIELD(ncclEpMemInfo_t, object, 8, unsigned);
FIELD(ncclEpMemInfo_t, peers, 12, unsigned);
FIELD(ncclEpMemInfo_t, offset, 16, size_t);
FIELD(ncclEpMemInfo_t, bytes, 24, size_t);
FIELD(ncclEpMemInfo_t, peer_data, 32, void* const*);
FIELD(ncclEpMemInfo_t, tensors, 40, unsigned long);
FIELD(ncclEpMemInfo_t, plain_tensors, 48, unsigned long);
FIELD(ncclEpMemInfo_t, fallbacks, 56, unsigned long);

// ---- Enums and macros --------------------------------------------------------------------------

static_assert(sizeof(ncclEpAlgorithm_t) == 4, "size of ncclEpAlgorithm_t");
static_assert(sizeof(ncclEpTensorFlags_t) == 4, "size of ncclEpTensorFlags_t");
static_assert(sizeof(ncclEpTensorTag_t) == 4, "size of ncclEpTensorTag_t");
VALUE(NCCL_EP_ALGO_LOW_LATENCY, 0);
VALUE(NCCL_EP_ALGO_HIGH_THROUGHPUT, 1);
VALUE(NCCL_EP_TENSOR_FLAG_NONE, 0);
VALUE(NCCL_EP_TENSOR_TAG_NONE, 0);
VALUE(NCCL_EP_TENSOR_TAG_TOKENS, 1);
VALUE(NCCL_EP_TENSOR_TAG_TOPK_IDX, 2);
VALUE(NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, 3);
VALUE(NCCL_EP_TENSOR_TAG_SCALES, 4);
VALUE(NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, 5);
VALUE(NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_HOST, 6);
VALUE(NCCL_EP_TENSOR_TAG_TOKENS_PER_EXPERTS, 7);
VALUE(NCCL_EP_AUTO, 0);
VALUE(NCCL_EP_OPERATION_LL_DISPATCH, 1);
VALUE(NCCL_EP_OPERATION_LL_COMBINE, 2);
VALUE(NCCL_EP_OPERATION_HT_DISPATCH, 3);
VALUE(NCCL_EP_OPERATION_HT_COMBINE, 4);
VALUE(NCCL_EP_VARIANT_AUTO, 0);
VALUE(NCCL_EP_VARIANT_LL_REDUCE, 1);
VALUE(NCCL_EP_VARIANT_LL_EXACT, 2);
VALUE(NCCL_EP_VARIANT_HT_RING, 3);
VALUE(NCCL_EP_VARIANT_HT_DIRECT, 4);
VALUE(NCCL_EP_VARIANT_HT_PULL, 5);

// The library has NCCL's numbers in its own code; they must be NCCL's.
VALUE(ncclInt8, 0);
VALUE(ncclUint8, 1);
VALUE(ncclInt32, 2);
VALUE(ncclUint32, 3);
VALUE(ncclInt64, 4);
VALUE(ncclUint64, 5);
VALUE(ncclFloat16, 6);
VALUE(ncclFloat32, 7);
VALUE(ncclFloat64, 8);
VALUE(ncclBfloat16, 9);
VALUE(ncclSuccess, 0);
VALUE(ncclUnhandledCudaError, 1);
VALUE(ncclSystemError, 2);
VALUE(ncclInternalError, 3);
VALUE(ncclInvalidArgument, 4);
VALUE(ncclInvalidUsage, 5);
VALUE(ncclRemoteError, 6);
VALUE(ncclInProgress, 7);

// ---- Types of handles, callbacks and functions -------------------------------------------------

static_assert(SAME((ncclEpGroup_t)0, struct ncclEpGroup*), "ncclEpGroup_t");
static_assert(SAME((ncclEpHandle_t)0, struct ncclEpHandle*), "ncclEpHandle_t");
static_assert(sizeof(ncclEpHandleConfig_t) == sizeof(void*), "ncclEpHandleConfig_t is a pointer");
static_assert(SAME((ncclEpAllocFn_t)0, cudaError_t (*)(void**, size_t)), "ncclEpAllocFn_t");
static_assert(SAME((ncclEpFreeFn_t)0, cudaError_t (*)(void*)), "ncclEpFreeFn_t");
static_assert(SAME((ncclEpSelect_t)0, int (*)(void*, const ncclEpQuery_t*, ncclEpChoice_t*)), "ncclEpSelect_t");

FUNCTION(ncclEpCreateGroup, ncclResult_t, ncclEpGroup_t*, ncclComm_t, const ncclEpGroupConfig_t*, cudaStream_t,
         ncclEpAllocFn_t, ncclEpFreeFn_t);
FUNCTION(ncclEpGroupDestroy, ncclResult_t, ncclEpGroup_t, cudaStream_t);
FUNCTION(ncclEpTensorCreate, ncclResult_t, ncclEpGroup_t, ncclNDTensor_t*, unsigned, ncclDataType_t, ncclEpTensorTag_t,
         unsigned, unsigned, unsigned, unsigned, unsigned);
FUNCTION(ncclEpTensorDestroy, ncclResult_t, ncclEpGroup_t, ncclNDTensor_t*);
FUNCTION(ncclEpCreateHandle, ncclResult_t, ncclEpHandle_t*, ncclEpGroup_t, const ncclNDTensor_t*,
         ncclNDTensor_t* const*, unsigned, const ncclEpHandleConfig_t*, cudaStream_t, bool);
FUNCTION(ncclEpHandleDestroy, ncclResult_t, ncclEpHandle_t);
FUNCTION(ncclEpDispatch, ncclResult_t, ncclEpHandle_t, const ncclNDTensor_t* const*, unsigned, ncclNDTensor_t* const*,
         unsigned, ncclNDTensor_t* const*, unsigned, unsigned, const ncclEpDispatchConfig_t*, cudaStream_t);
FUNCTION(ncclEpCombine, ncclResult_t, ncclEpHandle_t, const ncclNDTensor_t* const*, unsigned, ncclNDTensor_t* const*,
         unsigned, ncclNDTensor_t* const*, unsigned, unsigned, const ncclEpCombineConfig_t*, cudaStream_t);
FUNCTION(ncclEpComplete, ncclResult_t, ncclEpHandle_t, const ncclEpCompleteConfig_t*, cudaStream_t);
FUNCTION(ncclEpHandleGetNumRecvTokens, ncclResult_t, ncclEpHandle_t, unsigned*);
FUNCTION(ncclEpGetVersion, ncclResult_t, int*);
FUNCTION(ncclEpGetLastError, const char*, void);
FUNCTION(ncclEpGetAsyncError, ncclResult_t, ncclEpGroup_t, ncclResult_t*);
FUNCTION(ncclEpSetChoice, ncclResult_t, ncclEpGroup_t, unsigned, const ncclEpChoice_t*);
FUNCTION(ncclEpSetSelector, ncclResult_t, ncclEpGroup_t, ncclEpSelect_t, void*);
FUNCTION(ncclEpGroupCountRows, ncclResult_t, ncclEpGroup_t, int64_t*);
FUNCTION(ncclEpHandleWaitNumRecvTokens, ncclResult_t, ncclEpHandle_t, unsigned, unsigned*);
FUNCTION(ncclEpGroupTimeWaits, ncclResult_t, ncclEpGroup_t, int64_t*);
FUNCTION(ncclEpGroupTimeCombineWaits, ncclResult_t, ncclEpGroup_t, int64_t*);
FUNCTION(ncclEpHandleOpen, ncclResult_t, ncclEpHandle_t*, ncclEpGroup_t, unsigned);
FUNCTION(ncclEpHandleOpenBounded, ncclResult_t, ncclEpHandle_t*, ncclEpGroup_t, unsigned, unsigned);
FUNCTION(ncclEpHandleUpdate, ncclResult_t, ncclEpHandle_t, const ncclNDTensor_t*, ncclNDTensor_t* const*, unsigned,
         cudaStream_t);
FUNCTION(ncclEpMemAlloc, ncclResult_t, ncclEpGroup_t, void**, size_t);
FUNCTION(ncclEpMemFree, ncclResult_t, ncclEpGroup_t, void*);
FUNCTION(ncclEpMemRegister, ncclResult_t, ncclEpGroup_t, void*, size_t, void*);
FUNCTION(ncclEpMemDeregister, ncclResult_t, ncclEpGroup_t, void*);
FUNCTION(ncclEpMemInfo, ncclResult_t, ncclEpGroup_t, const void*, ncclEpMemInfo_t*);
FUNCTION(ncclEpPoolUse, ncclResult_t, ncclEpGroup_t, void*, size_t);
FUNCTION(ncclEpPoolAlloc, void*, size_t, int, cudaStream_t);
FUNCTION(ncclEpPoolFree, void, void*, size_t, int, cudaStream_t);
