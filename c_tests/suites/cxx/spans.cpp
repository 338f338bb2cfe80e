// nccl_ep.hpp in C++20: std::span for lists and shapes, fields by name.
#include <array>
#include <span>

#include "suites/cxx/cases.hpp"

static_assert(__cplusplus >= 202002L);

namespace {

EP_TEST(spans_are_lists_and_shapes) {
    const unsigned experts = 2 * static_cast<unsigned>(env->size);
    const Group group = Group::create(env->comm,
                                      {.version = 1,
                                       .algorithm = NCCL_EP_ALGO_LOW_LATENCY,
                                       .num_experts = experts,
                                       .max_tokens_per_rank = 4,
                                       .token_size_bytes = 128,
                                       .rdma_buffer_size = NCCL_EP_AUTO,
                                       .num_qp_per_rank = NCCL_EP_AUTO,
                                       .num_channels = NCCL_EP_AUTO},
                                      env->stream)
                            .value();
    void* memory = ep_device_alloc(static_cast<size_t>(experts) * 4 * 128);
    const int64_t none[] = {-1, -1};
    ep_upload(memory, none, sizeof(none));
    const std::array<int64_t, 2> sizes = {1, 2};
    Handle handle =
        Handle::create(group, Tensor::topk_idx(static_cast<int64_t*>(memory), std::span<const int64_t>(sizes)), {},
                       env->stream)
            .value();
    const Tensor home = Tensor::tokens(memory, ncclBfloat16, {1, 64});
    std::array<Tensor, 2> lists = {Tensor::tokens(memory, ncclBfloat16, {2, 4 * env->size, 64}), home};
    handle.dispatch(home, std::span<const Tensor>(lists).first(1), {}, env->stream).value();
    EP_CHECK(Refused(handle.dispatch(std::span(lists), home, {}, env->stream), ncclInvalidArgument,
                     "ncclEpDispatch", "inputs[1]"));
    ep_sync(env);
    EP_CHECK(handle.destroy().has_value());
    ep_device_free(memory);
}

}  // namespace
