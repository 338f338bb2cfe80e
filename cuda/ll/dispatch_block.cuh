// The context that all functions of a dispatch share: the operation, and the sources (nodes.cuh) whose rows it sends.
#pragma once

#include "../layout/expert_major.cuh"
#include "dispatch_rows.cuh"
#include "scheduler.cuh"

namespace nccl_ep::ll_dispatch_impl {

struct SharedStorage {
    StartState start;
    uint32_t most_tokens;
};
static_assert(sizeof(SharedStorage) + 4 * MAX_PEERS <= LL_STATIC_SHARED_BYTES, "launches leave no more room");

// A dispatch of rows of one kind (dispatch_rows.cuh) to an output of one layout.
template <typename Nodes, typename RowsOfKind, typename LayoutOfOutput = ExpertMajor>
struct DispatchOperation : Operation<Nodes> {
    // Whether the compiler is to know that the warp index is uniform. Not for plain rows of many tokens, where that
    // saves code but costs time: a dispatch of 64 tokens took 7.81 us instead of 7.72 (2 H200s).
    static constexpr bool kHasUniformWarp = RowsOfKind::kScaled || Nodes::kSeveral || Nodes::kWhole;
    using Rows = RowsOfKind;
    using Layout = LayoutOfOutput;
    using Operation<Nodes>::Operation;
};

template <typename Op>
struct Block {
    const LlDispatchParams& params;
    const Op& op;
    const typename Op::Rows& rows;
    SharedStorage& shared;
    // The number of tokens of each rank.
    uint32_t* tokens_of;
    // Two words per expert of the group: at first two histograms, then the table of Layout::find_begins, by source and
    // local expert.
    uint32_t* per_expert;

    const LlShape& shape = params.common.shape;
    uint32_t warp = Op::kHasUniformWarp ? warp_idx_of_all() : warp_idx();
    BankSlots bank_slots = {shape, params.common.peers.ranks};
    typename Op::Layout output = {shape, op.ranks()};
    BlockRange senders = senders_of(params.common);
    BlockRange receivers = receivers_of(params.common);
    BlockRange notifiers = {receivers.first, params.notify_blocks};

    // Whether this launch sends rows, and whether this block notifies the peers of them.
    __device__ bool sends() const { return op.sends() || op.relays(); }
    __device__ bool notifies() const { return sends() && notifiers.has_this_block(); }
    // The sources whose rows this launch sends: this rank, its remote sources, or both.
    __device__ uint32_t first_source() const { return Op::kSeveral && !op.sends() ? 1 : 0; }
    __device__ uint32_t sources() const {
        if constexpr (Op::kSeveral) {
            return (op.relays() ? op.nodes.nodes.sources : 1) - first_source();
        }
        return 1;
    }
    // The most tokens of a source that this launch sends.
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

template <typename Op>
__device__ __forceinline__ uint32_t num_experts(const Block<Op>& block) {
    return block.op.ranks() * block.shape.local_experts;
}

template <typename Op>
__device__ __forceinline__ int32_t expert_of_entry(const Block<Op>& block, const typename Op::Source& source,
                                                   uint32_t index) {
    return nccl_ep::expert_of_entry(block.op, source.ids(), index);
}

// How many chunks may come to this rank.
template <typename Op>
__device__ __forceinline__ uint32_t arriving_units(const Block<Op>& block) {
    return block.shared.most_tokens * block.op.ranks() * block.shape.chunks;
}

template <typename Op>
__device__ __forceinline__ void clear_histograms(const Block<Op>& block) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < num_experts(block) * 2; i += blockDim.x) {
        block.per_expert[i] = 0;
    }
}

}  // namespace nccl_ep::ll_dispatch_impl
