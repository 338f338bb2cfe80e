// The context that all functions of a combine share: the operation, and the tokens of this rank's sources (nodes.cuh).
#pragma once

#include "../layout/expert_major.cuh"
#include "topk_weights.cuh"
#include "scheduler.cuh"

namespace nccl_ep::ll_combine_impl {

// A row that a warp adds to the sum of a token: `index` is an output row of the dispatch, or a slot of the bank, filled
// by `peer`. Warps keep theirs in shared memory, as shuffles would take several times as much code.
struct alignas(16) Addend {  // one access
    int32_t index;
    float weight;
    int32_t peer;
};

struct SharedStorage {
    StartState start;
    Addend addends[LL_COMBINE_THREADS / kWarpSize][kWarpSize];
    // With kFromQueue, the counters of turns taken (BlockRange::next_unit).
    uint32_t next_send;
    uint32_t next_receive;
};

// The sizes of units: how many chunks of a row a warp sums at once, how many arriving rows it loads together, and how
// many rows for a sum that it sends. With kFromQueue warps take the next unit from a counter instead of every n-th one:
// with two or three units for each warp, those with three would end last.
struct FewTokens {
    static constexpr uint32_t kChunks = 1;
    static constexpr uint32_t kRows = 2;
    static constexpr uint32_t kSendRows = 4;
    static constexpr bool kFromQueue = false;
};
// More data in flight, which takes more code.
struct ManyTokens {
    static constexpr uint32_t kChunks = 2;
    static constexpr uint32_t kRows = 4;
    static constexpr uint32_t kSendRows = 4;
    static constexpr bool kFromQueue = true;
};
struct AllEntries {
    static constexpr uint32_t kChunks = 2;
    static constexpr uint32_t kRows = 4;
    static constexpr uint32_t kSendRows = 4;
    static constexpr bool kFromQueue = false;
};

// A combine of rows in one layout. In exact mode every entry's row is returned, and the home sums in the order of k.
template <typename Nodes, typename SizeOfUnits, bool Exact = false, typename LayoutOfRows = ExpertMajor>
struct CombineOperation : Operation<Nodes> {
    static constexpr bool kExact = Exact;
    static constexpr uint32_t kChunks = SizeOfUnits::kChunks;
    static constexpr uint32_t kRows = SizeOfUnits::kRows;
    static constexpr uint32_t kSendRows = SizeOfUnits::kSendRows;
    static constexpr bool kFromQueue = SizeOfUnits::kFromQueue;
    using Layout = LayoutOfRows;
    using Operation<Nodes>::Operation;
};

template <typename Op>
struct Block {
    const LlCombineParams& params;
    const Op& op;
    SharedStorage& shared;
    // The number of tokens of each rank.
    uint32_t* tokens_of;

    const LlShape& shape = params.common.shape;
    uint32_t warp = warp_idx_of_all();
    BankSlots bank_slots = {shape, params.common.peers.ranks};
    typename Op::Layout output = {shape, op.ranks()};
    // The units of a row.
    Units units = units_of_row<Op::kChunks>(shape);
    BlockRange senders = senders_of(params.common);
    BlockRange receivers = receivers_of(params.common);

    // The addends of this warp.
    __device__ __forceinline__ Addend* addends() const { return shared.addends[warp]; }
};

// A token of one of this rank's sources.
struct SourceToken {
    uint32_t number;
    uint32_t token;
};

// An upper bound for the number of all sources' tokens, and the one with number `index`, which may not exist.
template <typename Op>
__device__ __forceinline__ uint32_t tokens_of_sources(const Block<Op>& block) {
    if constexpr (Op::kSeveral) {
        const LlNodes& nodes = block.op.nodes.nodes;
        return max(block.shape.tokens, nodes.most_tokens) * nodes.sources;
    }
    return block.shape.tokens;
}

template <typename Op>
__device__ __forceinline__ SourceToken token_of_sources(const Block<Op>& block, uint32_t index) {
    if constexpr (Op::kSeveral) {
        const uint32_t sources = block.op.nodes.nodes.sources;
        return {index % sources, index / sources};
    }
    return {0, index};
}

template <typename Op>
__device__ __forceinline__ bool exists(const Block<Op>& block, const SourceToken& at) {
    if constexpr (Op::kSeveral) {
        if (at.number != 0) {
            return at.token < block.op.nodes.tokens_of(block.shape, at.number);
        }
    }
    return at.token < block.shape.tokens;
}

// How this lane's entry of a token takes part in the combine.
template <typename Op>
__device__ __forceinline__ TopkWeight topk_weight_of(const Block<Op>& block, const SourceToken& at) {
    if constexpr (Op::Layout::kCallerSums) {
        // The caller has applied the weights, and ids are those of the dispatch.
        const bool has_entry = lane_idx() < block.shape.top_k;
        const int32_t sent = has_entry ? block.op.experts_of(at.number, at.token)[lane_idx()] : kNowhere;
        return {dispatched_expert(block.op, sent), 1.0f, lane_idx()};
    }
    if constexpr (Op::kSeveral) {
        if (at.number != 0) {
            return topk_weight_of_source(block.op, at.number, at.token);
        }
    }
    TopkLoads words;
    words.load(block.params, at.token);
    return make_topk_weight(block.op, words);
}

// One warp of the grid sends this rank's fingerprint and checks those of the others, instead of sending rows.
__device__ __forceinline__ uint32_t fingerprint_warp() { return num_warps() / 2; }
template <typename Op>
__device__ __forceinline__ bool has_fingerprint_warp(const Block<Op>& block) {
    return block.receivers.index() == 0;
}
template <typename Op>
__device__ __forceinline__ bool is_fingerprint_warp(const Block<Op>& block) {
    return has_fingerprint_warp(block) && block.warp == fingerprint_warp();
}
template <typename Op>
__device__ __forceinline__ uint32_t sending_warps(const Block<Op>& block) {
    return num_warps() - (has_fingerprint_warp(block) ? 1 : 0);
}

}  // namespace nccl_ep::ll_combine_impl
