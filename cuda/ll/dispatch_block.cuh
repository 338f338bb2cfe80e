// What all functions of a dispatch see: the operation, and the sources (nodes.cuh) whose rows it sends.
#pragma once

#include "../layout/expert_major.cuh"
#include "dispatch_rows.cuh"
#include "scheduler.cuh"
#include "slots.cuh"

namespace nccl_ep::ll_dispatch_impl {

constexpr uint32_t kRouterWarps = 4;
constexpr uint32_t kRouterThreads = kRouterWarps * kWarpSize;
constexpr uint32_t kRouterBarrier = 1;

struct SharedStorage {
    Start start;
    uint32_t next_send;
    uint32_t next_receive;
    uint32_t most_tokens;
    // Barriers whose one phase ends when the routers know how many tokens each source has, and
    // where its rows begin.
    uint64_t tokens_known;
    uint64_t begins_known;
};
static_assert(sizeof(SharedStorage) + 4 * MAX_PEERS <= LL_STATIC_SHARED_BYTES, "launches leave no more room");

// A dispatch of rows of one kind (dispatch_rows.cuh) to an output of one layout.
template <typename Nodes, typename RowsOfKind, typename LayoutOfOutput = ExpertMajor>
struct DispatchOperation : Operation<Nodes> {
    using Rows = RowsOfKind;
    using Layout = LayoutOfOutput;
    using Operation<Nodes>::Operation;
};

// What all functions of the kernel see.
template <typename Op>
struct Block {
    const LlDispatchParams& params;
    const Op& op;
    const typename Op::Rows& rows;
    SharedStorage& shared;
    // Of each rank.
    uint32_t* tokens_of;
    // Two words per expert of the group. First the routers' histograms; then, by source and local
    // expert, where the source's rows begin.
    uint32_t* per_expert;

    const LlShape& shape = params.common.shape;
    BankSlots bank_slots = {shape, params.common.peers.ranks};
    typename Op::Layout output = {shape, op.ranks()};
    Share senders = senders_of(params.common);
    Share receivers = receivers_of(params.common);
    Share notifiers = {receivers.first, params.notify_blocks};

    // The sources whose rows this launch sends: this rank, those that it carries, or all.
    __device__ uint32_t first_source() const { return Op::kSeveral && !op.sends() ? 1 : 0; }
    __device__ uint32_t sources() const {
        if constexpr (Op::kSeveral) {
            return (op.relays() ? op.nodes.nodes.sources : 1) - first_source();
        }
        return 1;
    }
    // The most tokens of one of them.
    __device__ uint32_t most_tokens() const {
        if constexpr (Op::kSeveral) {
            const uint32_t own = op.sends() ? shape.tokens : 0;
            return op.relays() ? max(own, op.nodes.nodes.most_tokens) : own;
        }
        return shape.tokens;
    }
    __device__ typename Op::Source source(uint32_t number) const {
        if constexpr (!Op::kSeveral) {
            return {params};
        } else if (number != 0) {
            return op.nodes.source(shape, number);
        } else {
            return {0, op.rank(), shape.tokens, params.topk_idx, params.tokens};
        }
    }
};

__device__ __forceinline__ void meet_routers() { named_barrier(kRouterBarrier, kRouterThreads); }

template <typename Op>
__device__ __forceinline__ uint32_t num_experts(const Block<Op>& block) {
    return block.op.ranks() * block.shape.local_experts;
}

template <typename Op>
__device__ __forceinline__ int32_t expert_of_entry(const Block<Op>& block, const typename Op::Source& source,
                                                   uint32_t index) {
    return nccl_ep::expert_of_entry(block.op, source.ids(), index);
}

// The chunks that may come to this rank.
template <typename Op>
__device__ __forceinline__ uint32_t arriving_units(const Block<Op>& block) {
    return block.shared.most_tokens * block.op.ranks() * block.shape.chunks;
}

template <typename Op>
__device__ __forceinline__ void clear_histograms(const Block<Op>& block) {
    for (uint32_t i = threadIdx.x; i < num_experts(block) * 2; i += blockDim.x) {
        block.per_expert[i] = 0;
    }
}

}  // namespace nccl_ep::ll_dispatch_impl
