// The receiving half of a combine: a warp takes a token, waits for its rows, and sums them.
#pragma once

#include "combine_block.cuh"
#include "partials.cuh"
#include "sum.cuh"

namespace nccl_ep::ht_combine_impl {

// A token's row from the rank of this lane's expert; NULL in lanes without a rank's first expert. With zones this
// rank's own row is in several slots: then `row` is NULL, and `sequence` is its number.
struct RankRow {
    const uint8_t* row;
    uint32_t sequence;
    bool is_remote;
};

template <typename Block>
__device__ __forceinline__ RankRow rank_row_of(const Block& block, const TokenEntries& entries) {
    if (!entries.is_first()) {
        return {nullptr, 0, false};
    }
    const HtPairs& pairs = block.shared.pairs;
    const uint32_t rank = entries.rank;
    if (rank == block.rank()) {
        const uint64_t row = block.row_from(rank, entries.entry.index);
        if constexpr (Block::kZones) {
            return {nullptr, static_cast<uint32_t>(row), false};
        }
        return {block.params.rows + row_format(block.common).offset(row), 0, false};
    }
    const uint32_t sequence = unit_of_row(WholeSlots{}, pairs.received[rank], entries.entry.index);
    return {own_rings(block.common).row(rank, sequence), sequence, true};
}

// Each lane waits for its row, if that comes from a peer.
template <typename Block>
__device__ __forceinline__ bool wait_for_rank_rows(const Block& block, const TokenEntries& entries,
                                                   const RankRow& rank_row) {
    bool ok = true;
    if (rank_row.is_remote) {
        const uint32_t rank = entries.rank;
        const uint64_t* at = own_rings(block.common).arrival(rank, rank_row.sequence);
        const Arrival arrival = wait_for_row(
            block.common, at, rank_row.sequence,
            {WAIT_STREAMED_ROW, rank, block.shared.pairs.operation});
        ok = arrival.ok && arrival.data == block.common.shape.fingerprint;
        if (arrival.ok && !ok) {
            fail_for_scales(block.common, rank, arrival.data, {0, 0});
        }
    }
    // All lanes read the rows that single lanes have waited for.
    sync_warp();
    return ballot(ok).all();
}

// One warp sums, for a token, kVecs accesses per lane from number `first` on: those of all ranks' rows, then those of
// the other nodes' sums, of which this lane has the one at `partial`.
template <typename Type, typename Block>
__device__ __forceinline__ void sum_chunk(const Block& block, uint32_t token, LaneMask firsts,
                                          const RankRow& rank_row, const uint8_t* partial, uint32_t first,
                                          Vec16* out) {
    const RowFormat format = row_format(block.common);
    const uint32_t vecs = format.vecs();
    float sum[kVecs][Type::kPerVec] = {};
    add_rows<Type>(sum, firsts, rank_row.row, first, vecs);
    if (block.partials.rounds_own_node()) {
        // Each lane reads back only what it has stored itself.
        store_sum<Type>(sum, first, vecs, out);
        clear_sum<Type>(sum);
    }
    for (uint32_t base = 0; base < block.partials.nodes(); base += kWarpSize) {
        const uint8_t* row =
            base == 0 ? partial : block.partials.row(format, token, base + lane_idx());
        row = block.partials.is_own(base + lane_idx()) ? reinterpret_cast<const uint8_t*>(out) : row;
        add_rows<Type>(sum, ballot(row != nullptr), row, first, vecs);
    }
    store_sum<Type>(sum, first, vecs, out);
}

// One warp gathers the gradients of a token, one column per lane: those of its experts, ascending, then zeros.
template <typename Block>
__device__ void gather_gradients(const Block& block, uint32_t token, const TokenEntries& entries,
                                 const RankRow& rank_row) {
    const uint32_t columns = block.params.columns;
    const uint8_t* gradients = nullptr;
    if (rank_row.is_remote) {
        gradients = rank_row.row + block.common.shape.row_bytes;
    } else if (entries.is_first() && !Block::kZones) {
        const uint64_t row = block.row_from(block.rank(), entries.entry.index);
        gradients = reinterpret_cast<const uint8_t*>(block.params.gradients + row * columns);
    }
    uint32_t word = 0;
    uint32_t begin = 0;
    for (LaneMask left = entries.firsts; left.any(); left.drop_first()) {
        const uint32_t lane = left.first();
        const uint32_t count = min(entries.experts_from(lane), columns);
        const uint32_t* from = reinterpret_cast<const uint32_t*>(shuffle(gradients, lane));
        const bool is_mine = lane_idx() >= begin && lane_idx() < begin + count;
        if constexpr (Block::kZones) {
            const uint32_t row = shuffle(rank_row.sequence, lane);
            if (is_mine && from == nullptr) {
                word = __float_as_uint(block.input.gradient(block, row, lane_idx() - begin));
            }
        }
        if (is_mine && (!Block::kZones || from != nullptr)) {
            word = ld_relaxed_sys(from + lane_idx() - begin);
        }
        begin += count;
    }
    word = block.partials.gradient(token, block.common.handle.top_k, word, columns);
    if (lane_idx() < columns) {
        // The location is found again, as keeping it during the sum would cost registers.
        const auto location = block.scope.location(block.common, token);
        block.scope.gradients(block.params, location, token)[lane_idx()] = __uint_as_float(word);
    }
}

template <typename Type, typename Block>
__device__ void sum_tokens(const Block& block, typename Block::Buffers* buffers) {
    const HtCommon& common = block.common;
    const uint32_t vecs = row_format(common).vecs();
    for (;;) {
        const uint32_t token = block.receivers.next_unit(&block.shared.next_token);
        if (token >= common.handle.tokens) {
            break;
        }
        const TokenEntries entries(common, token);
        const RankRow rank_row = rank_row_of(block, entries);
        const auto addends = block.input.addends_of(block, token, entries.firsts, rank_row);
        if (!wait_for_rank_rows(block, entries, rank_row)) {
            break;
        }
        Vec16* out = reinterpret_cast<Vec16*>(block.scope.row_of_token(
            block.params.out, row_format(common), block.scope.location(common, token), token));
        if constexpr (Block::kZones) {
            block.input.sum_to(out, addends, row_format(common).bytes, *buffers);
        } else {
            const uint8_t* partial = block.partials.row(row_format(common), token, lane_idx());
            for (uint32_t first = 0; first < vecs; first += kVecs * kWarpSize) {
                sum_chunk<Type>(block, token, entries.firsts, rank_row, partial, first, out);
            }
        }
        if (block.params.columns != 0) {
            gather_gradients(block, token, entries, rank_row);
        }
        sync_warp();
        if (rank_row.is_remote) {
            give_credit(common, WholeSlots{}, block.shared.pairs, entries.rank, rank_row.sequence);
        }
    }
}

}  // namespace nccl_ep::ht_combine_impl
