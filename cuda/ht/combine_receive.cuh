// How a combine receives: a warp takes a token, waits for its rows, and sums them.
#pragma once

#include "combine_block.cuh"
#include "partials.cuh"
#include "sum.cuh"

namespace nccl_ep::ht_combine_impl {

// Where a token's row from this lane's rank lies; NULL in lanes that are no rank's first. With zones this rank's own
// row lies in several slots: `row` is NULL, and `sequence` is its number.
struct Part {
    const uint8_t* row;
    uint32_t sequence;
    bool is_remote;
};

template <typename Block>
__device__ __forceinline__ Part part_of(const Block& block, const TokenEntries& entries) {
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

// Each lane waits for its part.
template <typename Block>
__device__ __forceinline__ bool wait_for_parts(const Block& block, const TokenEntries& entries,
                                               const Part& part) {
    bool ok = true;
    if (part.is_remote) {
        const uint32_t rank = entries.rank;
        const uint64_t* at = own_rings(block.common).arrival(rank, part.sequence);
        const Arrival arrival = wait_for_row(
            block.common, at, part.sequence,
            {WAIT_STREAMED_ROW, rank, block.shared.pairs.operation});
        ok = arrival.ok && arrival.data == block.common.shape.fingerprint;
        if (arrival.ok && !ok) {
            fail_for_scales(block.common, rank, arrival.data, {0, 0});
        }
    }
    // All lanes read what one has waited for.
    sync_warp();
    return ballot(ok).all();
}

// One warp sums kVecs accesses per lane, from number `first` on, of all parts of a token, then of the sums of
// other nodes; `partial` is that of this lane's node.
template <typename Type, typename Block>
__device__ __forceinline__ void sum_chunk(const Block& block, uint32_t token, LaneMask firsts,
                                          const Part& part, const uint8_t* partial, uint32_t first,
                                          Vec16* out) {
    const RowFormat format = row_format(block.common);
    const uint32_t vecs = format.vecs();
    float sum[kVecs][Type::kPerVec] = {};
    add_rows<Type>(sum, firsts, part.row, first, vecs);
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

// One warp gathers the gradients of a token, one column per lane: those of its experts, ascending,
// then zeros.
template <typename Block>
__device__ void gather_gradients(const Block& block, uint32_t token, const TokenEntries& entries,
                                 const Part& part) {
    const uint32_t columns = block.params.columns;
    const uint8_t* gradients = nullptr;
    if (part.is_remote) {
        gradients = part.row + block.common.shape.row_bytes;
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
            const uint32_t row = shuffle(part.sequence, lane);
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
        // The place is found again: kept during the sum, it would cost registers.
        const auto place = block.scope.place(block.common, token);
        block.scope.gradients(block.params, place, token)[lane_idx()] = __uint_as_float(word);
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
        const Part part = part_of(block, entries);
        const auto addends = block.input.addends_of(block, token, entries.firsts, part);
        if (!wait_for_parts(block, entries, part)) {
            break;
        }
        Vec16* out = reinterpret_cast<Vec16*>(block.scope.row_of_token(
            block.params.out, row_format(common), block.scope.place(common, token), token));
        if constexpr (Block::kZones) {
            block.input.sum_to(out, addends, row_format(common).bytes, *buffers);
        } else {
            const uint8_t* partial = block.partials.row(row_format(common), token, lane_idx());
            for (uint32_t first = 0; first < vecs; first += kVecs * kWarpSize) {
                sum_chunk<Type>(block, token, entries.firsts, part, partial, first, out);
            }
        }
        if (block.params.columns != 0) {
            gather_gradients(block, token, entries, part);
        }
        sync_warp();
        if (part.is_remote) {
            give_credit(common, WholeSlots{}, block.shared.pairs, entries.rank, part.sequence);
        }
    }
}

}  // namespace nccl_ep::ht_combine_impl
