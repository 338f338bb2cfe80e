// Refusals of ncclEpTensorCreate and ncclEpTensorDestroy, including failures of the caller's own allocation functions.
#include "suites/errors/errors.h"

// Creates a tensor of `ndim` dimensions of `size`; the creation must fail.
static ncclResult_t create(ncclEpGroup_t group, unsigned ndim, unsigned datatype, unsigned size) {
    ncclNDTensor_t tensor;
    ncclNDTensor_t untouched;
    memset(&tensor, 0x5a, sizeof(tensor));
    memset(&untouched, 0x5a, sizeof(untouched));
    const ncclResult_t result = ncclEpTensorCreate(group, &tensor, ndim, (ncclDataType_t)datatype,
                                                   NCCL_EP_TENSOR_TAG_TOKENS, size, size, size, size, size);
    EP_CHECK_EQ_BYTES(&tensor, &untouched, sizeof(tensor));
    return result;
}

static void check_tensor_works(ncclEpGroup_t group) {
    ncclNDTensor_t tensor = ep_tensor_2d(group, ncclFloat32, NCCL_EP_TENSOR_TAG_TOKENS, 2, 4);
    ep_tensor_fill(&tensor, 0);
    EP_CHECK_NCCL(ncclEpTensorDestroy(group, &tensor));
}

LL_SESSION_TEST(tensor_arguments) {
    const ncclEpGroup_t group = session->group;
    EP_REFUSED("tensor-create-out",
               ncclEpTensorCreate(group, NULL, 1, ncclInt8, NCCL_EP_TENSOR_TAG_NONE, 1, 1, 1, 1, 1));
    EP_REFUSED("tensor-create-ndim", create(group, 0, ncclInt8, 1));
    EP_REFUSED_AS("tensor-create-ndim", create(group, 6, ncclInt8, 1), "got 6, expected 1 to 5");
    EP_REFUSED("tensor-create-datatype", create(group, 1, 12, 1));
    // 2^63 bytes, then 2^160: the product must not wrap.
    EP_REFUSED("tensor-create-bytes", create(group, 3, ncclInt8, 1U << 21));
    EP_REFUSED_AS("tensor-create-bytes", create(group, 5, ncclInt8, 0xffffffffU),
                  "got [4294967295, 4294967295, 4294967295, 4294967295, 4294967295], expected less than 2^63 bytes");
    EP_TEXT("tensor-create-memory", create(group, 3, ncclInt8, 1U << 20), "ncclEpTensorCreate: *: CUDA*");
    check_tensor_works(group);

    // The device never allocated this memory; the descriptor is emptied all the same.
    EpView foreign;
    ep_view_1d(&foreign, (char*)session->tokens + 16, ncclInt8, NCCL_EP_TENSOR_TAG_NONE, 1);
    foreign.tensor.sizes = NULL;
    foreign.tensor.strides = NULL;
    EP_TEXT("tensor-destroy-memory", ncclEpTensorDestroy(group, &foreign.tensor), "ncclEpTensorDestroy: *: CUDA*");
    EP_CHECK(foreign.tensor.data == NULL);
}

// The error that cudaGetLastError has for the program is not touched, whatever the library meets itself.
LL_SESSION_TEST(failure_of_the_caller) {
    const cudaError_t before = cudaSetDevice(-1);
    EP_CHECK(before != cudaSuccess);
    EP_CHECK_RESULT(create(session->group, 3, ncclInt8, 1U << 20), ncclUnhandledCudaError);
    EP_CHECK_EQ_I64(cudaPeekAtLastError(), before);
    EP_CHECK_NCCL(make_valid_call(session, kDispatch, 0));
    EP_CHECK_EQ_I64(cudaPeekAtLastError(), before);
    (void)cudaGetLastError();
}

// ---- Callbacks ---------------------------------------------------------------------------------

typedef enum { kWell, kFails, kGivesNull } Mood;
static Mood g_mood;

static cudaError_t moody_alloc(void** data, size_t bytes) {
    if (g_mood == kFails) return cudaErrorMemoryAllocation;
    *data = NULL;
    return g_mood == kGivesNull ? cudaSuccess : cudaMalloc(data, bytes);
}

// Frees, then reports failure, so that the test leaks nothing.
static cudaError_t moody_free(void* data) {
    const cudaError_t result = cudaFree(data);
    return g_mood == kFails ? cudaErrorInvalidValue : result;
}

EP_TEST(tensor_callbacks_that_fail) {
    const ncclEpGroupConfig_t config =
        ep_group_config(NCCL_EP_ALGO_LOW_LATENCY, (unsigned)env->size * kLocalExperts, kMaxTokens, kTokenBytes);
    ncclEpGroup_t group = NULL;
    g_mood = kWell;
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group, env->comm, &config, env->stream, moody_alloc, moody_free));
    g_mood = kFails;
    EP_REFUSED_AS("tensor-create-alloc-fails", create(group, 1, ncclInt8, 1), "{2}");
    g_mood = kGivesNull;
    EP_REFUSED("tensor-create-alloc-null", create(group, 1, ncclInt8, 1));
    g_mood = kWell;
    check_tensor_works(group);

    ncclNDTensor_t tensor = ep_tensor_1d(group, ncclInt8, NCCL_EP_TENSOR_TAG_NONE, 16);
    g_mood = kFails;
    EP_REFUSED_AS("tensor-destroy-free-fails", ncclEpTensorDestroy(group, &tensor), "{1}");
    EP_CHECK(tensor.data == NULL && tensor.sizes == NULL && tensor.strides == NULL);
    // A second call has nothing left to free, so it cannot fail.
    EP_CHECK_NCCL(ncclEpTensorDestroy(group, &tensor));
    g_mood = kWell;
    check_tensor_works(group);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}
