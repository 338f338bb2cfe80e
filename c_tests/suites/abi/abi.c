// The C side of the ABI: the compiler checks the layout of every struct, the value of every
// constant and the type of every function. Programs built against the first release rely on all of
// them; docs/abi.md lists the numbers. scripts/testing/abi_checks.py checks what the linker sees.
#include <pthread.h>
#include <string.h>

#include "harness/harness.h"

#define SAME(expression, type) _Generic((expression), type: 1, default: 0)

// ---- Structs: size, alignment, and offset and type of each field -------------------------------

#define LAYOUT(owner, bytes, alignment)                          \
    _Static_assert(sizeof(owner) == (bytes), "size of " #owner); \
    _Static_assert(_Alignof(owner) == (alignment), "alignment of " #owner)
#define FIELD(owner, field, at, type)                                               \
    _Static_assert(offsetof(owner, field) == (at), "offset of " #owner "." #field); \
    _Static_assert(SAME(&((owner*)0)->field, type*), "type of " #owner "." #field)

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

// ---- Enums and macros --------------------------------------------------------------------------

#define VALUE(name, value) _Static_assert((name) == (value), "value of " #name)

_Static_assert(sizeof(ncclEpAlgorithm_t) == 4, "size of ncclEpAlgorithm_t");
_Static_assert(sizeof(ncclEpTensorFlags_t) == 4, "size of ncclEpTensorFlags_t");
_Static_assert(sizeof(ncclEpTensorTag_t) == 4, "size of ncclEpTensorTag_t");
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

_Static_assert(SAME((ncclEpGroup_t)0, struct ncclEpGroup*), "ncclEpGroup_t");
_Static_assert(SAME((ncclEpHandle_t)0, struct ncclEpHandle*), "ncclEpHandle_t");
_Static_assert(sizeof(ncclEpHandleConfig_t) == sizeof(void*), "ncclEpHandleConfig_t is a pointer");
_Static_assert(SAME((ncclEpAllocFn_t)0, cudaError_t (*)(void**, size_t)), "ncclEpAllocFn_t");
_Static_assert(SAME((ncclEpFreeFn_t)0, cudaError_t (*)(void*)), "ncclEpFreeFn_t");

#define FUNCTION(name, result, ...) \
    _Static_assert(SAME(&(name), result(*)(__VA_ARGS__)), "type of " #name)

FUNCTION(ncclEpCreateGroup, ncclResult_t, ncclEpGroup_t*, ncclComm_t, const ncclEpGroupConfig_t*,
         cudaStream_t, ncclEpAllocFn_t, ncclEpFreeFn_t);
FUNCTION(ncclEpGroupDestroy, ncclResult_t, ncclEpGroup_t, cudaStream_t);
FUNCTION(ncclEpTensorCreate, ncclResult_t, ncclEpGroup_t, ncclNDTensor_t*, unsigned, ncclDataType_t,
         ncclEpTensorTag_t, unsigned, unsigned, unsigned, unsigned, unsigned);
FUNCTION(ncclEpTensorDestroy, ncclResult_t, ncclEpGroup_t, ncclNDTensor_t*);
FUNCTION(ncclEpCreateHandle, ncclResult_t, ncclEpHandle_t*, ncclEpGroup_t, const ncclNDTensor_t*,
         ncclNDTensor_t* const*, unsigned, const ncclEpHandleConfig_t*, cudaStream_t, bool);
FUNCTION(ncclEpHandleDestroy, ncclResult_t, ncclEpHandle_t);
FUNCTION(ncclEpDispatch, ncclResult_t, ncclEpHandle_t, const ncclNDTensor_t* const*, unsigned,
         ncclNDTensor_t* const*, unsigned, ncclNDTensor_t* const*, unsigned, unsigned,
         const ncclEpDispatchConfig_t*, cudaStream_t);
FUNCTION(ncclEpCombine, ncclResult_t, ncclEpHandle_t, const ncclNDTensor_t* const*, unsigned,
         ncclNDTensor_t* const*, unsigned, ncclNDTensor_t* const*, unsigned, unsigned,
         const ncclEpCombineConfig_t*, cudaStream_t);
FUNCTION(ncclEpComplete, ncclResult_t, ncclEpHandle_t, const ncclEpCompleteConfig_t*, cudaStream_t);
FUNCTION(ncclEpHandleGetNumRecvTokens, ncclResult_t, ncclEpHandle_t, unsigned*);
FUNCTION(ncclEpGetVersion, ncclResult_t, int*);
FUNCTION(ncclEpGetLastError, const char*, void);
FUNCTION(ncclEpGetAsyncError, ncclResult_t, ncclEpGroup_t, ncclResult_t*);

// ---- At run time -------------------------------------------------------------------------------

static void the_version_is_one_number(EpEnv* env) {
    (void)env;
    int version = -1;
    int again = -2;
    EP_CHECK_NCCL(ncclEpGetVersion(&version));
    EP_CHECK_NCCL(ncclEpGetVersion(&again));
    EP_CHECK_EQ_I64(version, NCCL_EP_VERSION_CODE);
    EP_CHECK_EQ_I64(version, again);
}

static void destroying_nothing_succeeds(EpEnv* env) {
    EP_CHECK_NCCL(ncclEpGroupDestroy(NULL, env->stream));
    EP_CHECK_NCCL(ncclEpGroupDestroy(NULL, NULL));
    EP_CHECK_NCCL(ncclEpHandleDestroy(NULL));
    EP_CHECK_NCCL(ncclEpTensorDestroy(NULL, NULL));
}

// The first release's README declares such an object, which did not compile there.
static void configuration_objects_can_be_declared(EpEnv* env) {
    const ncclEpCompleteConfig_t complete = {0};
    const ncclEpCombineConfig_t combine = {0};
    EP_CHECK_RESULT(ncclEpComplete(NULL, &complete, env->stream), ncclInvalidArgument);
    EP_CHECK_RESULT(ncclEpCombine(NULL, NULL, 0, NULL, 0, NULL, 0, 0, &combine, env->stream),
                    ncclInvalidArgument);
}

static void* last_error_of_new_thread(void* length) {
    *(size_t*)length = strlen(ncclEpGetLastError());
    return NULL;
}

static void the_last_error_belongs_to_its_thread(EpEnv* env) {
    (void)env;
    EP_CHECK_RESULT(ncclEpGetVersion(NULL), ncclInvalidArgument);
    EP_CHECK_STR_CONTAINS(ncclEpGetLastError(), "ncclEpGetVersion");
    pthread_t thread;
    size_t length = 1;
    EP_REQUIRE(pthread_create(&thread, NULL, last_error_of_new_thread, &length) == 0);
    EP_REQUIRE(pthread_join(thread, NULL) == 0);
    EP_CHECK_EQ_U64(length, 0);
    EP_CHECK_STR_CONTAINS(ncclEpGetLastError(), "ncclEpGetVersion");
}

int main(int argc, char** argv) {
    static const EpCase cases[] = {
        EP_CASE(the_version_is_one_number),
        EP_CASE(destroying_nothing_succeeds),
        EP_CASE(configuration_objects_can_be_declared),
        EP_CASE(the_last_error_belongs_to_its_thread),
    };
    return ep_main(argc, argv, cases, sizeof(cases) / sizeof(cases[0]));
}
