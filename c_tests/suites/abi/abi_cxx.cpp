// The C++ side of the ABI: the layout is that of abi.c, functions have C linkage, default arguments
// do not change their types, and calls may omit those arguments, as C++ programs written for the
// first release do.
#include <cstring>
#include <type_traits>

#include "harness/harness.h"

namespace {

// ---- Structs and enums -------------------------------------------------------------------------

template <typename T>
constexpr bool kPlain = std::is_standard_layout_v<T> && std::is_trivially_copyable_v<T>;

#define LAYOUT(owner, bytes, alignment) \
    static_assert(kPlain<owner> && sizeof(owner) == (bytes) && alignof(owner) == (alignment))
#define FIELD(owner, field, at, type) \
    static_assert(offsetof(owner, field) == (at) && std::is_same_v<decltype(owner::field), type>)

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
LAYOUT(ncclEpCombineConfig_t, 4, 4);
LAYOUT(ncclEpCompleteConfig_t, 4, 4);

static_assert(sizeof(ncclEpAlgorithm_t) == 4 && sizeof(ncclEpTensorFlags_t) == 4 &&
              sizeof(ncclEpTensorTag_t) == 4);
static_assert(NCCL_EP_ALGO_LOW_LATENCY == 0 && NCCL_EP_ALGO_HIGH_THROUGHPUT == 1);
static_assert(NCCL_EP_TENSOR_FLAG_NONE == 0 && NCCL_EP_AUTO == 0);
static_assert(NCCL_EP_TENSOR_TAG_NONE == 0 && NCCL_EP_TENSOR_TAG_TOKENS == 1 &&
              NCCL_EP_TENSOR_TAG_TOPK_IDX == 2 && NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS == 3 &&
              NCCL_EP_TENSOR_TAG_SCALES == 4 &&
              NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE == 5 &&
              NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_HOST == 6 &&
              NCCL_EP_TENSOR_TAG_TOKENS_PER_EXPERTS == 7);

// ---- Functions ---------------------------------------------------------------------------------

template <auto function, typename Type>
constexpr bool kHasType = std::is_same_v<decltype(function), Type*>;

using Inputs = const ncclNDTensor_t* const*;
using Outputs = ncclNDTensor_t* const*;

static_assert(std::is_same_v<ncclEpAllocFn_t, cudaError_t (*)(void**, size_t)>);
static_assert(std::is_same_v<ncclEpFreeFn_t, cudaError_t (*)(void*)>);
static_assert(std::is_pointer_v<ncclEpHandleConfig_t>);
static_assert(kHasType<&ncclEpCreateGroup,
                       ncclResult_t(ncclEpGroup_t*, ncclComm_t, const ncclEpGroupConfig_t*,
                                    cudaStream_t, ncclEpAllocFn_t, ncclEpFreeFn_t)>);
static_assert(kHasType<&ncclEpGroupDestroy, ncclResult_t(ncclEpGroup_t, cudaStream_t)>);
static_assert(
    kHasType<&ncclEpTensorCreate,
             ncclResult_t(ncclEpGroup_t, ncclNDTensor_t*, unsigned, ncclDataType_t,
                          ncclEpTensorTag_t, unsigned, unsigned, unsigned, unsigned, unsigned)>);
static_assert(kHasType<&ncclEpTensorDestroy, ncclResult_t(ncclEpGroup_t, ncclNDTensor_t*)>);
static_assert(kHasType<&ncclEpCreateHandle,
                       ncclResult_t(ncclEpHandle_t*, ncclEpGroup_t, const ncclNDTensor_t*, Outputs,
                                    unsigned, const ncclEpHandleConfig_t*, cudaStream_t, bool)>);
static_assert(kHasType<&ncclEpHandleDestroy, ncclResult_t(ncclEpHandle_t)>);
static_assert(kHasType<&ncclEpDispatch, ncclResult_t(ncclEpHandle_t, Inputs, unsigned, Outputs,
                                                     unsigned, Outputs, unsigned, unsigned,
                                                     const ncclEpDispatchConfig_t*, cudaStream_t)>);
static_assert(kHasType<&ncclEpCombine, ncclResult_t(ncclEpHandle_t, Inputs, unsigned, Outputs,
                                                    unsigned, Outputs, unsigned, unsigned,
                                                    const ncclEpCombineConfig_t*, cudaStream_t)>);
static_assert(kHasType<&ncclEpComplete,
                       ncclResult_t(ncclEpHandle_t, const ncclEpCompleteConfig_t*, cudaStream_t)>);
static_assert(kHasType<&ncclEpHandleGetNumRecvTokens, ncclResult_t(ncclEpHandle_t, unsigned*)>);
static_assert(kHasType<&ncclEpGetVersion, ncclResult_t(int*)>);
static_assert(kHasType<&ncclEpGetLastError, const char*()>);
static_assert(kHasType<&ncclEpGetAsyncError, ncclResult_t(ncclEpGroup_t, ncclResult_t*)>);

// ---- At run time -------------------------------------------------------------------------------

void left_out_sizes_are_one(ncclEpGroup_t group) {
    ncclNDTensor_t tensor;
    std::memset(&tensor, 0, sizeof(tensor));
    EP_CHECK_NCCL(ncclEpTensorCreate(group, &tensor, 5, ncclFloat32, NCCL_EP_TENSOR_TAG_TOKENS, 3));
    if (!EP_CHECK(tensor.sizes != nullptr && tensor.strides != nullptr)) return;
    const unsigned expected[] = {3, 1, 1, 1, 1};
    EP_CHECK_EQ_BYTES(tensor.sizes, expected, sizeof(expected));
    EP_CHECK(tensor.data != nullptr);
    EP_CHECK_NCCL(ncclEpTensorDestroy(group, &tensor));
}

void a_handle_without_use_fp8(const EpEnv* env, ncclEpGroup_t group) {
    ncclNDTensor_t ids = ep_tensor_2d(group, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, 2, 2);
    ncclEpHandle_t handle = nullptr;
    EP_CHECK_NCCL(ncclEpCreateHandle(&handle, group, &ids, nullptr, 0, nullptr, env->stream));
    EP_CHECK(handle != nullptr);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    EP_CHECK_NCCL(ncclEpTensorDestroy(group, &ids));
}

void default_arguments_may_be_left_out(EpEnv* env) {
    const ncclEpGroupConfig_t config = ep_group_config(
        NCCL_EP_ALGO_LOW_LATENCY, static_cast<unsigned>(env->size), /*max_tokens_per_rank=*/4,
        /*token_size_bytes=*/64);
    ncclEpGroup_t group = nullptr;
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group, env->comm, &config, env->stream));
    left_out_sizes_are_one(group);
    a_handle_without_use_fp8(env, group);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}

void a_configuration_object_can_be_declared(EpEnv* env) {
    ncclEpCompleteConfig_t config{};
    EP_CHECK_RESULT(ncclEpComplete(nullptr, &config, env->stream), ncclInvalidArgument);
    EP_CHECK_STR_CONTAINS(ncclEpGetLastError(), "ncclEpComplete");
}

void the_version_is_there(EpEnv*) {
    int version = 0;
    EP_CHECK_NCCL(ncclEpGetVersion(&version));
    EP_CHECK(version > 0);
}

}  // namespace

int main(int argc, char** argv) {
    static const EpCase cases[] = {
        EP_CASE(default_arguments_may_be_left_out),
        EP_CASE(a_configuration_object_can_be_declared),
        EP_CASE(the_version_is_there),
    };
    return ep_main(argc, argv, cases, sizeof(cases) / sizeof(cases[0]));
}
