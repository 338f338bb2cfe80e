// What the warps of a dispatch block have in common, whatever they do.
#pragma once

#include "ll_rows.cuh"

namespace nccl_ep::ll_dispatch_impl {

constexpr uint32_t kRouterWarps = 4;
constexpr uint32_t kRouterThreads = kRouterWarps * kWarpSize;
constexpr uint32_t kRouterBarrier = 1;

// An entry packet's data: local expert in the high bits, place among the source's rows below.
constexpr uint32_t kPlaceBits = LL_PLACE_BITS;
constexpr uint32_t kMaxPlace = (1u << kPlaceBits) - 1;
constexpr uint32_t kElsewhere = 0xffffffffu;

struct Shared {
    Start start;
    uint32_t next_send;
    uint32_t next_receive;
    uint32_t most_tokens;
    // Barriers whose one phase ends when the routers know how many tokens each source has, and
    // where its rows begin.
    uint64_t tokens_known;
    uint64_t begins_known;
    uint32_t tokens_of[MAX_PEERS];
};

// What all functions of the kernel see.
struct Block {
    const LlDispatchParams& params;
    const LlShape& shape;
    const Op& op;
    Shared& shared;
    // Two words per expert of the group. First the routers' histograms; then, by source and local
    // expert, the slot where the source's rows begin.
    uint32_t* per_expert;
    Share senders;
    Share announcers;
    Share receivers;
};

__device__ __forceinline__ void meet_routers() { named_barrier(kRouterBarrier, kRouterThreads); }

__device__ __forceinline__ uint32_t num_experts(const Block& block) {
    return block.op.ranks() * block.shape.local_experts;
}

__device__ __forceinline__ int32_t expert_of_entry(const Block& block, uint32_t index) {
    return nccl_ep::expert_of_entry(block.op, block.params.topk_idx, index);
}

// The chunks that may come to this rank.
__device__ __forceinline__ uint32_t arriving_units(const Block& block) {
    return block.shared.most_tokens * block.op.ranks() * block.shape.chunks;
}

}  // namespace nccl_ep::ll_dispatch_impl
