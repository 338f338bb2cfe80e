// The sending half of a combine: weights to the ranks of the experts, and rows or their sums to the home ranks.
#pragma once

#include "chunk.cuh"
#include "combine_block.cuh"
#include "sum.cuh"

namespace nccl_ep::ll_combine_impl {

// Sends each weight to the rank of its expert, if that is a peer; the warps of the blocks `notifiers` take a token
// each.
template <typename Op>
__device__ void send_weights(const Block<Op>& block, const BlockRange& notifiers) {
    const Op& op = block.op;
    const uint32_t tokens = tokens_of_sources(block);
    const uint32_t step = num_warps() * notifiers.blocks;
#pragma unroll 1
    for (uint32_t index = notifiers.unit(block.warp); index < tokens; index += step) {
        const SourceToken at = token_of_sources(block, index);
        if (Op::kSeveral && !exists(block, at)) {
            continue;
        }
        const TopkWeight topk = topk_weight_of(block, at);
        const int32_t peer = op.nodes.peer_of(rank_of_expert(block.shape, topk.expert));
        if (peer >= 0 && is_active(op.common.peers, peer)) {
            uint32_t home = op.rank();
            if constexpr (Op::kSeveral) {
                home = at.number == 0 ? home : op.nodes.nodes.rank_of_source[at.number];
            }
            put_value(op.at(peer).entries(home, at.token) + lane_idx(),
                      op.packet(__float_as_uint(topk.weight)));
        }
    }
}

// The dispatch's output row for this lane's entry of (home, token); kNowhere, or kDropped.
template <typename Op>
__device__ __forceinline__ int32_t row_of_lane(const Block<Op>& block, uint32_t home, uint32_t token) {
    return lane_idx() < block.shape.top_k ? block.op.rows_of(home, token)[lane_idx()] : kNowhere;
}

// Makes a token's rows the warp's addends, in the order of k; `found` is the result of row_of_lane. Returns the lanes
// that have a row. Rows are checked, as the handle's memory is undefined if no dispatch has run.
template <typename Op>
__device__ __forceinline__ LaneMask list_rows(const Block<Op>& block, int32_t found) {
    const bool is_row = found < 0 || static_cast<uint32_t>(found) < block.output.rows();
    const int32_t row = is_row ? found : kNowhere;
    const LaneMask named = ballot(row != kNowhere);
    if (named.has_this()) {
        block.addends()[named.count_before()] = {row, 0.0f, static_cast<int32_t>(lane_idx())};
    }
    sync_warp();
    return named;
}

// Loads chunks of the rows of the addends from `base` on; there are `count` in all.
template <typename Op>
__device__ __forceinline__ void load_rows(const Block<Op>& block, uint32_t base, uint32_t count,
                                          const Chunks<Op::kChunks>& chunks, Vec16 (&vec)[Op::kSendRows][Op::kChunks]) {
    const Addend* const addends = block.addends();
#pragma unroll
    for (uint32_t i = 0; i < Op::kSendRows; ++i) {
        const int32_t from = base + i < count ? addends[base + i].index : kDropped;
        const Vec16* at = reinterpret_cast<const Vec16*>(
            block.params.rows + row_format(block.shape).offset(max(from, 0)) + chunks.lane_byte());
#pragma unroll
        for (uint32_t j = 0; j < Op::kChunks; ++j) {
            vec[i][j] = {{0, 0, 0, 0}};
            if (from >= 0 && chunks.holds(j)) {
                vec[i][j] = ld_const(at + j * kWarpSize);
            }
        }
    }
}

// Slot `slot` of the bank to which rows for `home` go.
template <typename Op>
__device__ __forceinline__ BankRow<Remote> row_at_home(const Block<Op>& block, uint32_t home, uint32_t slot) {
    return block.op.at(block.op.nodes.forwarder_of(home)).row(slot);
}

// Exact mode: sends chunks of the rows of `count` addends, each to its own slot.
template <typename Op>
__device__ __forceinline__ void send_each(const Block<Op>& block, const WorkUnit& outgoing, uint32_t count,
                                          const Chunks<Op::kChunks>& chunks) {
    const Addend* const addends = block.addends();
#pragma unroll 1
    for (uint32_t base = 0; base < count; base += Op::kSendRows) {
        Vec16 vec[Op::kSendRows][Op::kChunks];
        load_rows(block, base, count, chunks, vec);
        const auto row_of = [&](uint32_t i) {
            return row_at_home(block, outgoing.rank,
                               block.bank_slots.of_entry(outgoing.token, addends[base + i].peer));
        };
        uint32_t with_sentinel = 0;
#pragma unroll
        for (uint32_t i = 0; i < Op::kSendRows; ++i) {
            if (base + i >= count) {
                break;
            }
            const uint32_t found = put_chunks(row_of(i), chunks, [&](uint32_t j) { return vec[i][j]; });
            with_sentinel |= found << (i * Op::kChunks);
        }
        if (any_lane(with_sentinel != 0)) {
#pragma unroll 1
            for (uint32_t i = 0; i < min(Op::kSendRows, count - base); ++i) {
                signal_sentinels(block.op, row_of(i), chunks, with_sentinel >> (i * Op::kChunks));
            }
        }
    }
}

// Waits for the weights of the addends of the lanes `named` and fills them in; false in a lane that gives up.
template <typename Op>
__device__ __forceinline__ bool await_weights(const Block<Op>& block, const WorkUnit& outgoing, LaneMask named) {
    const Op& op = block.op;
    Arrival weight = {true, 0};
    if (named.has_this()) {
        weight = wait_for_packet_in(op, op.here().entries(outgoing.rank, outgoing.token) + lane_idx(),
                                    op.from(outgoing.rank, WAIT_WEIGHT));
        block.addends()[named.count_before()].weight = __uint_as_float(weight.data);
    }
    sync_warp();
    return weight.ok;
}

// Sends chunks of the weighted sum of the rows of the lanes `named`. A single row is sent as it is: its home applies
// the weight.
template <typename Type, typename Op>
__device__ __forceinline__ void send_sum(const Block<Op>& block, const WorkUnit& outgoing, LaneMask named,
                                         const Chunks<Op::kChunks>& chunks) {
    const Op& op = block.op;
    const Addend* const addends = block.addends();
    const uint32_t count = named.count();
    Vec16 alone[Op::kChunks];
    Sum<Type, Op::kChunks> sum;
    bool has_weight = true;
#pragma unroll 1
    for (uint32_t base = 0; base < count; base += Op::kSendRows) {
        Vec16 vec[Op::kSendRows][Op::kChunks];
        load_rows(block, base, count, chunks, vec);
        if (base == 0) {
#pragma unroll
            for (uint32_t j = 0; j < Op::kChunks; ++j) {
                alone[j] = vec[0][j];
            }
            // While the loads are in flight.
            if (count != 1) {
                has_weight = await_weights(block, outgoing, named);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < Op::kSendRows; ++i) {
            if (base + i >= count) {
                break;
            }
            sum.add(vec[i], addends[base + i].weight);
        }
    }
    // Without its weights the sum is wrong, and a home that is only late would use it.
    if (all_lanes(has_weight)) {
        const uint32_t slot =
            block.bank_slots.of_sum(op.nodes.number_of(outgoing.rank), outgoing.token, op.common.peers.rank);
        send_chunks(op, row_at_home(block, outgoing.rank, slot), chunks,
                    [&](uint32_t i) { return count == 1 ? alone[i] : sum.rounded(i); });
    }
}

// One warp sends a unit; `found` is the result of row_of_lane.
template <typename Type, typename Op>
__device__ void send_unit(const Block<Op>& block, const WorkUnit& outgoing, int32_t found) {
    const LaneMask named = list_rows(block, found);
    if (!named.any()) {
        return;
    }
    const Chunks<Op::kChunks> chunks(block.shape, outgoing.number);
    if constexpr (Op::kExact) {
        send_each(block, outgoing, named.count(), chunks);
    } else {
        send_sum<Type>(block, outgoing, named, chunks);
    }
    sync_warp();  // before the next unit overwrites the addends
}

}  // namespace nccl_ep::ll_combine_impl
