// What a combine sends: weights to the ranks of the experts, and rows, or sums of them, to the homes.
#pragma once

#include "chunk.cuh"
#include "combine_block.cuh"
#include "sum.cuh"

namespace nccl_ep::ll_combine_impl {

// One warp of `tellers` per token: each weight goes to the rank of its expert, if that is a peer.
template <typename Op>
__device__ void send_weights(const Block<Op>& block, const Share& tellers) {
    const Op& op = block.op;
    const uint32_t tokens = tokens_of_sources(block);
    const uint32_t step = num_warps() * tellers.blocks;
#pragma unroll 1
    for (uint32_t index = tellers.unit(block.warp); index < tokens; index += step) {
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

// The output row of dispatch for this lane's entry of (home, token), kNowhere or kDropped.
template <typename Op>
__device__ __forceinline__ int32_t row_of_lane(const Block<Op>& block, uint32_t home, uint32_t token) {
    return lane_idx() < block.shape.top_k ? block.op.rows_of(home, token)[lane_idx()] : kNowhere;
}

// One warp sends some chunks; `found` is what row_of_lane says. The handle's memory holds anything if its
// dispatch has not run; no such row is taken at its word.
template <typename Type, typename Op>
__device__ void send_unit(const Block<Op>& block, const UnitOfAll& outgoing, int32_t found) {
    const Op& op = block.op;
    const uint32_t home = outgoing.rank;
    const uint32_t token = outgoing.token;
    const bool is_row = found < 0 || static_cast<uint32_t>(found) < block.output.rows();
    const int32_t row = is_row ? found : kNowhere;
    const LaneMask named = ballot(row != kNowhere);
    if (!named.any()) {
        return;
    }
    const Chunks<Op::kChunks> chunks(block.shape, outgoing.number);
    Addend* const addends = block.addends();
    if (named.has_this()) {
        addends[named.count_before()] = {row, 0.0f, static_cast<int32_t>(lane_idx())};
    }
    sync_warp();
    const auto row_in = [&](uint32_t slot) { return op.at(op.nodes.forwarder_of(home)).row(slot); };
    // A row that travels alone is sent as it is, without its weight.
    const uint32_t count = named.count();
    Vec16 alone[Op::kChunks];
    Sum<Type, Op::kChunks> sum;
    Arrival weight = {true, 0};
#pragma unroll 1
    for (uint32_t base = 0; base < count; base += Op::kSendRows) {
        Vec16 vec[Op::kSendRows][Op::kChunks];
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
        if (base == 0) {
#pragma unroll
            for (uint32_t j = 0; j < Op::kChunks; ++j) {
                alone[j] = vec[0][j];
            }
            if (!Op::kExact && count != 1) {
                if (named.has_this()) {
                    weight = wait_for_packet_in(op, op.here().entries(home, token) + lane_idx(),
                                                op.from(home, WAIT_WEIGHT));
                    addends[named.count_before()].weight = __uint_as_float(weight.data);
                }
                sync_warp();
            }
        }
        const auto row_of = [&](uint32_t i) {
            return row_in(block.bank_slots.of_entry(token, addends[base + i].peer));
        };
        uint32_t with_sentinel = 0;
#pragma unroll
        for (uint32_t i = 0; i < Op::kSendRows; ++i) {
            if (base + i >= count) {
                break;
            }
            if constexpr (Op::kExact) {
                const uint32_t found = put_chunks(row_of(i), chunks, [&](uint32_t j) { return vec[i][j]; });
                with_sentinel |= found << (i * Op::kChunks);
            } else {
                sum.add(vec[i], addends[base + i].weight);
            }
        }
        if (Op::kExact && any_lane(with_sentinel != 0)) {
#pragma unroll 1
            for (uint32_t i = 0; i < min(Op::kSendRows, count - base); ++i) {
                signal_sentinels(op, row_of(i), chunks, with_sentinel >> (i * Op::kChunks));
            }
        }
    }
    // The home may be late, not gone, and would take a sum without its weights for a right one.
    if (!Op::kExact && all_lanes(weight.ok)) {
        send_chunks(op, row_in(block.bank_slots.of_sum(op.nodes.number_of(home), token, op.common.peers.rank)), chunks,
                    [&](uint32_t i) { return count == 1 ? alone[i] : sum.rounded(i); });
    }
    sync_warp();  // its addends are done with
}

}  // namespace nccl_ep::ll_combine_impl
