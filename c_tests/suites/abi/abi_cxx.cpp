// The C++ side of the ABI: what a C++ compiler sees is the same (layout.h), default arguments do not
// change types, and calls may omit them, as C++ programs written for the first release do.
#include "suites/abi/layout.h"

#include <cstring>

namespace {

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

EP_TEST(default_arguments_may_be_left_out) {
    const ncclEpGroupConfig_t config = ep_group_config(
        NCCL_EP_ALGO_LOW_LATENCY, static_cast<unsigned>(env->size), /*max_tokens_per_rank=*/4,
        /*token_size_bytes=*/64);
    ncclEpGroup_t group = nullptr;
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group, env->comm, &config, env->stream));
    left_out_sizes_are_one(group);
    a_handle_without_use_fp8(env, group);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}

}  // namespace
