// What a block of a combine sees: the operation, and the tokens of this rank's sources (nodes.cuh).
#pragma once

#include "../layout/expert_major.cuh"
#include "topk_weights.cuh"
#include "scheduler.cuh"

namespace nccl_ep::ll_combine_impl {

// A row that a warp adds to the sum of a token: of the output of the dispatch, or in a slot of the bank, from a peer.
// Warps keep theirs in shared memory, as shuffles take several times as much code.
struct alignas(16) Addend {  // one access
    int32_t index;
    float weight;
    int32_t peer;
};

struct SharedStorage {
    Start start;
    Addend addends[LL_COMBINE_THREADS / kWarpSize][kWarpSize];
    // The next turns that a warp may take (Share::next_unit), where warps take what is left.
    uint32_t next_send;
    uint32_t next_receive;
};

// How much of a token a warp takes at once: chunks of each row; arriving rows, and rows for a sum that it sends, that
// are loaded together. And whether warps take any unit that is left instead of every n-th: with two or three units for
// each, those with three would end last.
struct FewTokens {
    static constexpr uint32_t kChunks = 1;
    static constexpr uint32_t kRows = 2;
    static constexpr uint32_t kSendRows = 4;
    static constexpr bool kFromQueue = false;
};
// With more in flight at a time, which takes more code.
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

// A combine of rows that lie as a dispatch of one layout left them. `Exact`: every entry's row comes home, summed in
// the order of k.
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
    // Of each rank.
    uint32_t* tokens_of;

    const LlShape& shape = params.common.shape;
    uint32_t warp = warp_idx_of_all();
    BankSlots bank_slots = {shape, params.common.peers.ranks};
    typename Op::Layout output = {shape, op.ranks()};
    // Of a row.
    Units units = units_of_row<Op::kChunks>(shape);
    Share senders = senders_of(params.common);
    Share receivers = receivers_of(params.common);

    // This warp's.
    __device__ __forceinline__ Addend* addends() const { return shared.addends[warp]; }
};

// A token of one of this rank's sources.
struct SourceToken {
    uint32_t number;
    uint32_t token;
};

// How many tokens the sources have at most, and which one is number `index` of them.
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

// What this lane's entry of a token has to do with the combine.
template <typename Op>
__device__ __forceinline__ TopkWeight topk_weight_of(const Block<Op>& block, const SourceToken& at) {
    if constexpr (Op::Layout::kSummed) {
        // What a rank gives is added as it is, as the dispatch has found it.
        const bool has_entry = lane_idx() < block.shape.top_k;
        const int32_t sent = has_entry ? block.op.experts_of(at.number, at.token)[lane_idx()] : kNowhere;
        return {dispatched_expert(block.op, sent), 1.0f, lane_idx()};
    }
    if constexpr (Op::kSeveral) {
        if (at.number != 0) {
            return topk_weight_of_source(block.op, at.number, at.token);
        }
    }
    TopkWords words;
    words.load(block.params, at.token);
    return make_topk_weight(block.op, words);
}

// One warp of the grid sends the fingerprint of this rank and checks the others' fingerprints, instead of rows.
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
