// The context that all functions of a dispatch share.
#pragma once

#include "../layout/flat.cuh"
#include "credits.cuh"
#include "notify.cuh"
#include "rows.cuh"
#include "scheduler.cuh"
#include "scope.cuh"
#include "tail.cuh"

namespace nccl_ep::ht_dispatch_impl {

struct SharedStorage {
    HtPairs pairs;
    // For each source, the first of this block's rows that is not known to have arrived.
    uint32_t arrived[MAX_PEERS];
    NotifyState notify_state;
    uint32_t next_own;
    uint32_t next_token;
    uint32_t next_unused;
    uint64_t barriers[HT_DISPATCH_THREADS / kWarpSize];
};
static_assert(sizeof(SharedStorage) <= HT_STATIC_SHARED_BYTES, "launches leave no more room");

template <typename Scope, typename Rows, typename LayoutOfOutput = Flat>
struct Block {
    using Layout = LayoutOfOutput;
    using TokenLocation = typename Scope::TokenLocation;
    using Prefetched = typename Rows::Prefetched;
    static constexpr bool kSenderStoresLocal = Rows::kSenderStoresLocal;
    static constexpr bool kZones = Rows::kZones;

    const HtDispatchParams& params;
    Scope scope;
    Rows rows;
    SharedStorage& shared;
    // HT_ZERO_BYTES of zeros in shared memory.
    const uint8_t* zeros;

    const HtCommon& common = params.common;
    BlockRange senders = {0, common.shape.send_blocks};
    BlockRange receivers = {senders.blocks, gridDim.x - senders.blocks};
    // Whether the caller wants rows; rows or scales; ids and weights.
    bool wants_rows = params.out != nullptr;
    bool wants_images = wants_rows || rows.scales_word() != 0;
    bool wants_routing = params.out_idx != nullptr;

    __device__ uint32_t rank() const { return common.peers.rank; }
    __device__ uint32_t ranks() const { return common.peers.ranks; }
    __device__ uint32_t top_k() const { return common.handle.top_k; }
    __device__ CallerRouting caller_routing(uint32_t token, TokenLocation location) const {
        if (!scope.has_routing(params) || token >= common.handle.tokens) {
            return {};
        }
        return {scope.routing(params, location, token), top_k()};
    }
    __device__ const uint8_t* row_of_token(uint32_t token, TokenLocation location) const {
        const RowFormat format = {rows.token_bytes(common), common.shape.chunk_bytes};
        return scope.row_of_token(params.tokens, format, location, token);
    }
    // The output row for row `index` from `source`.
    __device__ uint32_t row_from(uint32_t source, uint32_t index) const {
        return scope.template row<Layout>(shared.pairs, source, index);
    }
    __device__ uint8_t* out_row(uint32_t row) const {
        return params.out + uint64_t{row} * rows.payload_bytes(common);
    }
};

// One warp writes the ids and weights of a received row, one entry per lane; with zones only the weights.
template <typename Block>
__device__ __forceinline__ void write_routing(const Block& block, uint32_t row,
                                              const RoutingEntry& entry) {
    if constexpr (Block::kZones) {
        block.rows.write_weight(block, row, entry.weight);
        return;
    }
    if (block.wants_routing && lane_idx() < block.top_k()) {
        const uint64_t index = uint64_t{row} * block.top_k() + lane_idx();
        block.params.out_idx[index] = entry.id;
        block.params.out_weights[index] = entry.weight;
    }
}

// The weight of each lane's expert, if ids and weights are given.
template <typename Block>
__device__ __forceinline__ float weight_of_lane(const Block& block, const TokenEntries& entries,
                                                const CallerRouting& given) {
    return given.weight_of(block.scope.id_of(block.common, entries), block.top_k());
}

// A token's row that stays on this rank.
struct LocalRow {
    // Whether the token goes to this rank at all.
    bool is_here;
    // The lane with its first expert here, and its index among the rows that stay on this rank.
    uint32_t lane;
    uint32_t index;

    // All lanes call this and the other functions.
    template <typename Block>
    __device__ LocalRow(const Block& block, const TokenEntries& entries) {
        const LaneMask own =
            ballot(entries.is_first() && static_cast<uint32_t>(entries.rank) == block.rank());
        is_here = own.any();
        lane = is_here ? own.first() : 0;
        index = shuffle(entries.entry.index, lane);
    }

    // The output row, if is_here.
    template <typename Block>
    __device__ uint32_t row(const Block& block) const {
        return block.row_from(block.rank(), index);
    }

    // Writes the ids and weights of the row, if is_here; `weight` is that of each lane's expert.
    template <typename Block>
    __device__ void write_routing(const Block& block, const TokenEntries& entries, float weight) const {
        if (block.scope.has_routing(block.params)) {
            ht_dispatch_impl::write_routing(block, row(block),
                                            RoutingEntry(block.common, entries, lane, weight));
        }
    }
};

}  // namespace nccl_ep::ht_dispatch_impl
