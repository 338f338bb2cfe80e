// How a combine sums: the terms of a token, in their order, as their rows arrive.
#pragma once

#include "combine_block.cuh"
#include "sum.cuh"

namespace nccl_ep::ll_combine_impl {

// What a lane adds to the sum of a token: the row in a slot of the bank, from a peer, with a weight.
struct Term {
    uint32_t slot;
    int32_t peer;
    float weight;
};

// Terms are entries, as they are, in the order of the combine's ids.
template <typename Op>
__device__ Term term_of_entry(const Block<Op>& block, uint32_t token, int32_t peer) {
    const Gate gate = gate_of(block, {0, token});
    const uint32_t from = lane_in_order(gate);
    const uint32_t slot = block.bank_slots.of_entry(token, from);
    return {slot, shuffle(peer, from), shuffle(gate.weight, from)};
}

// One term per expert rank, ranks ascending in the lanes.
template <typename Op>
__device__ Term term_of_peer(const Block<Op>& block, const SourceToken& at, int32_t peer) {
    const LaneMask same = match(peer);
    const LaneMask firsts = first_of_each_peer(peer);
    const bool first = firsts.has_this();
    const bool is_alone = first && same.count() == 1;
    float weight = 1.0f;
    if (any_lane(is_alone)) {
        const Gate gate = gate_of(block, at);
        weight = is_alone ? gate.weight : weight;
    }
    Term term = {0, kNowhere, 0.0f};
    for (LaneMask left = firsts; left.any(); left.drop_first()) {
        const uint32_t lane = left.first();
        const int32_t other = shuffle(peer, lane);
        const float other_weight = shuffle(weight, lane);
        if (lane_idx() == ballot(first && peer < other).count()) {
            const uint32_t slot = block.bank_slots.of_sum(at.number, at.token, other);
            term = {slot, other, other_weight};
        }
    }
    return term;
}

// The rank that hosts this lane's entry, as it was dispatched; kNowhere if none does.
template <typename Op>
__device__ __forceinline__ int32_t host_of_entry(const Block<Op>& block, const SourceToken& at) {
    if (lane_idx() >= block.shape.top_k) {
        return kNowhere;
    }
    const int32_t sent = block.op.experts_of(at.number, at.token)[lane_idx()];
    return rank_of_expert(block.shape, dispatched_expert(block.op, sent));
}

// Adds what other nodes give for a token of this rank: the sums of those that have a part in it, the node
// before this one first; or, where sums go by ascending node, this node's sum, rounded, at its place among
// them: meanwhile it lies in the output row at `out`, where each lane reads what it has stored. `host` is that of
// this lane's entry.
template <typename Type, typename Op>
__device__ void add_other_nodes(const Block<Op>& block, uint32_t token, int32_t host,
                                const Chunk& chunk, uint8_t* out, Sum<Type>& sum) {
    constexpr uint32_t kNone = OWN_NODE_FIRST;
    const Op& op = block.op;
    // A row that travels alone takes no part if it is masked; a sum always does.
    const LaneMask same = match(host);
    const Gate gate = gate_of(block, {0, token});
    const bool takes_part = same.count() > 1 || !is_masked(gate.weight);
    uint32_t next = kNone;
    if (host >= 0 && takes_part && op.nodes.at(host).distance != 0) {
        next = op.nodes.place_of(op.nodes.at(host).distance);
    }
    uint32_t own = op.nodes.own_place();
    if (own != OWN_NODE_FIRST) {
        sum.rounded().store(out, chunk);
        sum = Sum<Type>();
    }
    while (true) {
        uint32_t nearest = min(next, own);
        for (uint32_t lanes = kWarpSize / 2; lanes != 0; lanes /= 2) {
            nearest = min(nearest, shuffle_xor(nearest, lanes));
        }
        if (nearest == kNone) {
            return;
        }
        next = next == nearest ? kNone : next;
        ChunkData data;
        if (nearest == own) {
            own = kNone;
            data.load_arriving(out, chunk);
        } else {
            const uint8_t* rows = body_of(op.nodes.returned_message(op.nodes.place_of(nearest)));
            data.load_const(rows + row_format(block.shape).offset(token), chunk);
        }
        sum.add(data, chunk, 1.0f);
    }
}

// Where the sum of a token goes; NULL if it is thrown away.
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

// One warp sums a chunk of a token and writes it out.
template <typename Type, typename Op>
__device__ void receive_chunk(const Block<Op>& block, const SourceToken& at, uint32_t chunk_idx) {
    const Op& op = block.op;
    const Chunk chunk(block.shape, chunk_idx);
    const int32_t host = host_of_entry(block, at);
    int32_t peer = op.nodes.peer_of(host);
    peer = peer >= 0 && is_active(op.common.peers, peer) ? peer : kNowhere;
    const Term term = !Op::kSeveral && block.params.exact != 0
                          ? term_of_entry(block, at.token, peer)
                          : term_of_peer(block, at, peer);
    const LaneMask which = ballot(term.peer != kNowhere);
    if (term.peer != kNowhere && block.shape.tokens > kPollWholeTokens) {
        wait_for_end(op, op.here().row(term.slot), chunk, op.nodes.rank_of_peer(term.peer));
    }
    sync_warp();
    const auto row_of = [&](uint32_t lane) {
        return op.here().row(shuffle(term.slot, lane));
    };
    Sum<Type> sum;
    in_batches(
        which,
        [&](uint32_t lane, ChunkData& data) { data.load_arriving(row_of(lane).data, chunk); },
        [&](uint32_t lane, ChunkData& data) {
            const uint32_t from = shuffle(term.peer, lane);
            take(op, row_of(lane), chunk, op.nodes.rank_of_peer(from), data);
            sum.add(data, chunk, shuffle(term.weight, lane));
        });
    uint8_t* out = out_row(block, at);
    if (out == nullptr) {
        return;
    }
    if constexpr (Op::kSeveral) {
        if (at.number == 0) {
            add_other_nodes(block, at.token, host, chunk, out, sum);
        }
    }
    sum.rounded().store(out, chunk);
}

template <typename Op>
__device__ void check_fingerprints(const Block<Op>& block) {
    for (uint32_t rank = lane_idx(); rank < block.op.ranks(); rank += kWarpSize) {
        if (is_active(block.op.common.peers, block.op.nodes.carrier_of(rank))) {
            check_fingerprint(block.op, rank);
        }
    }
    sync_warp();
}

template <typename Type, typename Op>
__device__ void receive_rows(const Block<Op>& block) {
    const uint32_t chunks = block.shape.chunks;
    const uint32_t units = block.shape.tokens * chunks;
    if (is_fingerprint_warp(block)) {
        check_fingerprints(block);
    }
    for (uint32_t unit = block.receivers.next_unit(&block.shared.next_receive); unit < units;
         unit = block.receivers.next_unit(&block.shared.next_receive)) {
        receive_chunk<Type>(block, {0, unit / chunks}, unit % chunks);
    }
}

// Sums what the peers return for the ranks that this one carries.
template <typename Type, typename Op>
__device__ void relay_sums(const Block<Op>& block) {
    const LlNodes& nodes = block.op.nodes.nodes;
    const uint32_t chunks = block.shape.chunks;
    const uint32_t others = nodes.sources - 1;
    const uint32_t units = nodes.most_tokens * others * chunks;
    for (uint32_t unit = block.receivers.next_unit(&block.shared.next_receive); unit < units;
         unit = block.receivers.next_unit(&block.shared.next_receive)) {
        const uint32_t pair = unit / chunks;
        const SourceToken at = {1 + pair % others, pair / others};
        if (exists(block, at)) {
            receive_chunk<Type>(block, at, unit % chunks);
        }
    }
}

}  // namespace nccl_ep::ll_combine_impl
