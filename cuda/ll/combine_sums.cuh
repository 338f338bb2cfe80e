// The receiving half of a combine: sums the rows of each token, in a fixed order, as they arrive.
#pragma once

#include "chunk.cuh"
#include "combine_block.cuh"
#include "sum.cuh"

namespace nccl_ep::ll_combine_impl {

// Exact mode: makes the entries of a token the warp's addends, in the order of the combine's ids, and returns how many
// there are. `peer` hosts this lane's entry.
template <typename Op>
__device__ __forceinline__ uint32_t list_entries(const Block<Op>& block, uint32_t token, const TopkWeight& topk,
                                                 int32_t peer) {
    const uint32_t from = any_lane(topk.order != lane_idx()) ? lane_in_order(topk.order) : lane_idx();
    const int32_t from_peer = shuffle(peer, from);
    const float weight = shuffle(topk.weight, from);
    const LaneMask which = ballot(from_peer != kNowhere);
    if (which.has_this()) {
        const uint32_t slot = block.bank_slots.of_entry(token, from);
        block.addends()[which.count_before()] = {static_cast<int32_t>(slot), weight, from_peer};
    }
    return which.count();
}

// Outside exact mode: the addends are one row from each expert rank, ranks ascending or, if the caller has summed rows,
// in the order of the first k that names each rank.
template <typename Op>
__device__ __forceinline__ uint32_t list_sums(const Block<Op>& block, const SourceToken& at, const TopkWeight& topk,
                                              int32_t peer) {
    const LaneMask same = match(peer);
    const bool is_first = peer >= 0 && same.first() == lane_idx();
    const LaneMask which = ballot(is_first);
    uint32_t before = 0;
    if constexpr (Op::Layout::kCallerSums) {
        before = which.count_before();
    } else {
#pragma unroll 1
        for (LaneMask left = which; left.any(); left.drop_first()) {
            before += shuffle(peer, left.first()) < peer ? 1 : 0;
        }
    }
    if (is_first) {
        const uint32_t slot = block.bank_slots.of_sum(at.number, at.token, peer);
        block.addends()[before] = {static_cast<int32_t>(slot), same.count() == 1 ? topk.weight : 1.0f, peer};
    }
    return which.count();
}

template <typename Type, uint32_t kChunks>
__device__ __forceinline__ void store_sum(const Sum<Type, kChunks>& sum, uint8_t* row, const Chunks<kChunks>& chunks) {
#pragma unroll
    for (uint32_t i = 0; i < kChunks; ++i) {
        if (chunks.holds(i)) {
            st_row(as<Vec16>(row + chunks.lane_byte(i)), sum.rounded(i));
        }
    }
}

// Adds the other nodes' sums for a token of this rank, by distance from this node on. If nodes are summed in ascending
// order instead, this node's sum is rounded and added in its place; until then it is kept in the output row `out`,
// where each lane reads back only what it has stored. `host` hosts this lane's entry.
template <typename Type, typename Op>
__device__ void add_other_nodes(const Block<Op>& block, uint32_t token, const TopkWeight& topk, int32_t host,
                                const Chunks<Op::kChunks>& chunks, uint8_t* out, Sum<Type, Op::kChunks>& sum) {
    constexpr uint32_t kNone = OWN_NODE_FIRST;
    const Op& op = block.op;
    // A node with a single row of the token takes no part if that entry is masked; one with several always does.
    const LaneMask same = match(host);
    const bool takes_part = same.count() > 1 || !is_masked(topk.weight);
    uint32_t next = kNone;
    if (host >= 0 && takes_part && op.nodes.at(host).distance != 0) {
        next = op.nodes.place_of(op.nodes.at(host).distance);
    }
    uint32_t own = op.nodes.own_place();
    if (own != OWN_NODE_FIRST) {
        store_sum(sum, out, chunks);
        sum = Sum<Type, Op::kChunks>();
    }
    while (true) {
        uint32_t nearest = min(next, own);
#pragma unroll 1
        for (uint32_t lanes = kWarpSize / 2; lanes != 0; lanes /= 2) {
            nearest = min(nearest, shuffle_xor(nearest, lanes));
        }
        if (nearest == kNone) {
            return;
        }
        next = next == nearest ? kNone : next;
        const uint8_t* row = out;
        if (nearest == own) {
            own = kNone;
        } else {
            row = body_of(op.nodes.returned_message(op.nodes.place_of(nearest))) +
                  row_format(block.shape).offset(token);
        }
        Vec16 vec[Op::kChunks];
#pragma unroll
        for (uint32_t i = 0; i < Op::kChunks; ++i) {
            if (chunks.holds(i)) {
                vec[i] = ld_relaxed_sys(reinterpret_cast<const Vec16*>(row + chunks.lane_byte(i)));
            }
        }
        sum.add(vec, 1.0f);
    }
}

// Where the sum of a token goes; NULL if it is discarded.
template <typename Op>
__device__ __forceinline__ uint8_t* out_row(const Block<Op>& block, const SourceToken& at) {
    const RowFormat format = row_format(block.shape);
    if constexpr (Op::kSeveral) {
        if (at.number != 0) {
            return body_of(block.op.nodes.rows_message(at.number)) + format.offset(at.token);
        }
    }
    return block.params.out == nullptr ? nullptr : block.params.out + format.offset(at.token);
}

// Adds the first `count` addends in order, kRows at a time, once they have arrived, and fills their slots with
// kSentinel for the bank's next use. False if it gives up.
template <typename Type, typename Op>
__device__ __forceinline__ bool add_arriving(const Block<Op>& block, uint32_t count, const Chunks<Op::kChunks>& chunks,
                                             Sum<Type, Op::kChunks>& sum, LateWait& late) {
    const Op& op = block.op;
    const bool gently = block.shape.tokens > kPollWholeTokens;
#pragma unroll 1
    for (uint32_t base = 0; base < count; base += Op::kRows) {
        const Addend* addends = block.addends() + base;
        ArrivingRows<Op::kRows, Op::kChunks> rows(count - base, chunks, gently, [&](uint32_t i) {
            return op.here().row(addends[i].index).data;
        });
        const bool ok = wait_as_warp_in(op.common.wait, late, [&] {
            return rows.poll(gently, [&] {
                const uint32_t i = lane_idx() / Op::kChunks;
                const uint32_t chunk = chunks.index + lane_idx() % Op::kChunks;
                const bool has_flag = i < min(count - base, Op::kRows) && chunk < block.shape.chunks;
                uint64_t* flag = op.here().row(addends[has_flag ? i : 0].index).flags + chunk;
                return flagged_lanes(op, has_flag ? flag : nullptr).bits;
            });
        });
        if (!ok) {
            late.awaited = op.from(op.nodes.rank_of_peer(addends[rows.first_late()].peer), WAIT_ROW);
            return false;
        }
#pragma unroll
        for (uint32_t i = 0; i < Op::kRows; ++i) {
            if (base + i < count) {
#pragma unroll
                for (uint32_t j = 0; j < Op::kChunks; ++j) {
                    if (chunks.holds(j)) {
                        st_row(rows.at[i] + j * kWarpSize, all_sentinels());
                    }
                }
                sum.add(rows.vec[i], addends[i].weight);
            }
        }
    }
    return true;
}

// One warp sums unit `number` of a token's row and stores it; false if it gives up.
template <typename Type, typename Op>
__device__ __forceinline__ bool receive_unit(const Block<Op>& block, const SourceToken& at, uint32_t number,
                                             LateWait& late) {
    const Op& op = block.op;
    const Chunks<Op::kChunks> chunks(block.shape, number);
    const TopkWeight topk = topk_weight_of(block, at);
    const int32_t host = rank_of_expert(block.shape, topk.expert);
    int32_t peer = op.nodes.peer_of(host);
    peer = peer >= 0 && is_active(op.common.peers, peer) ? peer : kNowhere;
    uint32_t count;
    if constexpr (Op::kExact) {
        count = list_entries(block, at.token, topk, peer);
    } else {
        count = list_sums(block, at, topk, peer);
    }
    sync_warp();
    Sum<Type, Op::kChunks> sum;
    if (!add_arriving(block, count, chunks, sum, late)) {
        return false;
    }
    uint8_t* out = out_row(block, at);
    if (out == nullptr) {
        return true;
    }
    if constexpr (Op::kSeveral) {
        if (at.number == 0) {
            add_other_nodes(block, at.token, topk, host, chunks, out, sum);
        }
    }
    store_sum(sum, out, chunks);
    return true;
}

template <typename Op>
__device__ void check_fingerprints(const Block<Op>& block) {
#pragma unroll 1
    for (uint32_t rank = lane_idx(); rank < block.op.ranks(); rank += kWarpSize) {
        if (is_active(block.op.common.peers, block.op.nodes.forwarder_of(rank))) {
            check_fingerprint(block.op, rank);
        }
    }
    sync_warp();
}

// Which of the block's units this warp receives first. Warps come in descending order, as the first have more to send.
template <typename Op>
__device__ __forceinline__ uint32_t first_receive_turn(const Block<Op>& block) {
    return num_warps() - 1 - block.warp;
}

// Sums what was returned for this rank's tokens or, with `relays`, for those of its other sources. One function for
// both, so that the code exists once.
template <typename Type, typename Op>
__device__ __forceinline__ void receive_rows(const Block<Op>& block, bool relays) {
    uint32_t tokens = block.shape.tokens;
    uint32_t sources = 1;
    if constexpr (Op::kSeveral) {
        const LlNodes& nodes = block.op.nodes.nodes;
        tokens = relays ? nodes.most_tokens : tokens;
        sources = relays ? nodes.sources - 1 : sources;
    }
    const uint32_t units = tokens * sources * block.units.count;
    // One warp checks fingerprints instead.
    const uint32_t step = num_warps() * block.receivers.blocks - 1;
    const uint32_t turn = block.receivers.unit(first_receive_turn(block));
    const uint32_t first = turn - (turn < block.receivers.blocks * ((num_warps() - 1) / 2) ? 0 : 1);
    const auto from_queue = [&] { return block.receivers.next_unit(&block.shared.next_receive); };
#pragma unroll 1
    for (uint32_t unit = Op::kFromQueue ? from_queue() : first; unit < units;
         unit = Op::kFromQueue ? from_queue() : unit + step) {
        const DivMod pair = divide(unit, block.units.count, block.units.reciprocal);
        SourceToken at = {0, pair.quotient};
        if constexpr (Op::kSeveral) {
            at = {(relays ? 1 : 0) + pair.quotient % sources, pair.quotient / sources};
            if (!exists(block, at)) {
                continue;
            }
        }
        LateWait late;
        if (!receive_unit<Type>(block, at, pair.remainder, late)) {
            report_late(block.op, late);
            return;
        }
    }
}

}  // namespace nccl_ep::ll_combine_impl
