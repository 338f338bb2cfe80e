// The sending half of a dispatch: rows to the peers.
#pragma once

#include "dispatch_notices.cuh"

namespace nccl_ep::ll_dispatch_impl {

// The peer that hosts the expert of this lane's entry of `token`, negative if none does.
template <typename Op>
__device__ __forceinline__ int32_t peer_of_entry(const Block<Op>& block, const typename Op::Source& source,
                                                 uint32_t token) {
    if (lane_idx() >= block.shape.top_k) {
        return kNowhere;
    }
    const uint32_t entry = token * block.shape.top_k + lane_idx();
    const int32_t expert = expert_of_entry(block, source, entry);
    return block.op.nodes.peer_of(rank_of_expert(block.shape, expert));
}

// What a warp is about to send: a chunk of a token's row and, in each lane, the peer of one of the token's entries.
template <typename Op>
struct Outgoing {
    uint32_t unit;
    int32_t peer;
    typename Op::Rows::Fetched fetched;
};

// A unit of sending: a chunk of a token of a source.
struct Unit {
    uint32_t source;
    uint32_t token;
    uint32_t chunk_idx;
};

template <typename Op>
__device__ __forceinline__ Unit unit_at(const Block<Op>& block, uint32_t unit) {
    const DivMod at = divide(unit, block.shape.chunks, block.shape.chunks_reciprocal);
    const uint32_t pair = at.quotient;
    if constexpr (!Op::kSeveral) {
        return {0, pair, at.remainder};
    }
    const uint32_t sources = block.sources();
    return {block.first_source() + pair % sources, pair / sources, at.remainder};
}

template <typename Op>
__device__ __forceinline__ bool is_left(const Block<Op>& block, const Outgoing<Op>& outgoing) {
    return outgoing.unit < block.most_tokens() * block.sources() * block.shape.chunks;
}

// Starts to load the warp's unit, if there is one.
template <typename Op>
__device__ __forceinline__ void fetch(const Block<Op>& block, Outgoing<Op>& outgoing) {
    outgoing.peer = kNowhere;
    if (!is_left(block, outgoing)) {
        return;
    }
    const Unit taken = unit_at(block, outgoing.unit);
    const typename Op::Source source = block.source(taken.source);
    if (Op::kSeveral && taken.token >= source.tokens()) {
        return;
    }
    const auto chunk = block.rows.chunk(block.shape, taken.chunk_idx);
    block.rows.fetch(block.shape, source.rows(), taken.token, chunk, outgoing.fetched);
    outgoing.peer = peer_of_entry(block, source, taken.token);
}

// Sends the fetched chunk to every peer that hosts one of the token's experts.
template <typename Op>
__device__ void send_chunk(const Block<Op>& block, Outgoing<Op>& outgoing) {
    const Op& op = block.op;
    const Unit taken = unit_at(block, outgoing.unit);
    const auto chunk = block.rows.chunk(block.shape, taken.chunk_idx);
    const uint32_t source_rank = block.source(taken.source).rank();
    const uint32_t slot = block.bank_slots.of_token(source_rank, taken.token);
    const LaneMask peers = first_of_each_peer(outgoing.peer);
    // Calls `with` with the slot at each peer.
    const auto each_slot = [&](auto with) {
#pragma unroll 1
        for (LaneMask left = peers; left.any(); left.drop_first()) {
            const int32_t peer = shuffle(outgoing.peer, left.first());
            if (is_active(op.common.peers, peer)) {
                with(op.at(peer).row(slot));
            }
        }
    };
    block.rows.send(op, outgoing.fetched, chunk, each_slot);
}

// Sends all rows. `begin` is called after the first loads were issued, and says whether the operation goes on; so does
// the result.
template <typename Op, typename Begin>
__device__ __forceinline__ bool send_all(const Block<Op>& block, Begin begin) {
    const bool sends = block.sends() && block.senders.has_this_block();
    Outgoing<Op> outgoing;
    outgoing.unit = sends ? block.senders.unit(block.warp) : ~uint32_t{0};
#pragma unroll 1
    for (bool has_begun = false;; has_begun = true) {
        fetch(block, outgoing);
        if (!has_begun && !begin()) {
            return false;
        }
        if (!is_left(block, outgoing)) {
            return true;
        }
        send_chunk(block, outgoing);
        outgoing.unit += num_warps() * block.senders.blocks;
    }
}

}  // namespace nccl_ep::ll_dispatch_impl
