// The sending half of a dispatch: rows to the peers, and the notice of them.
#pragma once

#include "dispatch_routers.cuh"

namespace nccl_ep::ll_dispatch_impl {

// The peer that hosts this lane's entry of `token`, negative if none does.
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

// What a warp is about to send: a chunk of a token of a source, and in each lane the peer of one of its
// entries.
template <typename Op>
struct Outgoing {
    uint32_t unit;
    int32_t peer;
    typename Op::Rows::Fetched fetched;
};

// A chunk of a token of one of the launch's sources.
struct Unit {
    uint32_t source;
    uint32_t token;
    uint32_t chunk_idx;
};

template <typename Op>
__device__ __forceinline__ Unit unit_at(const Block<Op>& block, uint32_t unit) {
    const uint32_t pair = unit / block.shape.chunks;
    const uint32_t chunk_idx = unit % block.shape.chunks;
    if constexpr (!Op::kSeveral) {
        return {0, pair, chunk_idx};
    }
    const uint32_t sources = block.sources();
    return {block.first_source() + pair % sources, pair / sources, chunk_idx};
}

template <typename Op>
__device__ __forceinline__ bool is_left(const Block<Op>& block, const Outgoing<Op>& outgoing) {
    return outgoing.unit < block.most_tokens() * block.sources() * block.shape.chunks;
}

// Takes unit `unit`, if it is left, and starts loading it.
template <typename Op>
__device__ __forceinline__ void fetch(const Block<Op>& block, uint32_t unit, Outgoing<Op>& outgoing) {
    outgoing.unit = unit;
    if (!is_left(block, outgoing)) {
        return;
    }
    const Unit taken = unit_at(block, unit);
    const typename Op::Source source = block.source(taken.source);
    if (Op::kSeveral && taken.token >= source.tokens()) {
        outgoing.peer = kNowhere;
        return;
    }
    const auto chunk = block.rows.chunk(block.shape, taken.chunk_idx);
    block.rows.fetch(block.shape, source.rows(), taken.token, chunk, outgoing.fetched);
    outgoing.peer = peer_of_entry(block, source, taken.token);
}

// Sends what was fetched to every peer that hosts one of the token's experts.
template <typename Op>
__device__ void send_chunk(const Block<Op>& block, Outgoing<Op>& outgoing) {
    const Op& op = block.op;
    const Unit taken = unit_at(block, outgoing.unit);
    const auto chunk = block.rows.chunk(block.shape, taken.chunk_idx);
    const uint32_t source_rank = block.source(taken.source).rank();
    const uint32_t slot = block.bank_slots.of_token(source_rank, taken.token);
    const LaneMask peers = first_of_each_peer(outgoing.peer);
    // Calls `with` for the slot at each peer.
    const auto each_slot = [&](auto with) {
        for (LaneMask left = peers; left.any(); left.drop_first()) {
            const int32_t peer = shuffle(outgoing.peer, left.first());
            if (is_active(op.common.peers, peer)) {
                with(op.at(peer).row(slot));
            }
        }
    };
    block.rows.send(op, outgoing.fetched, chunk, each_slot);
}

// What a warp has to send and to notify of, and what it loads of that before all else.
template <typename Op>
struct Begun {
    bool notifies;
    bool sends;
    Outgoing<Op> outgoing;
    // The expert of this thread's first entry.
    int32_t expert;
};

// The warps of the block that send have taken one unit each after this.
template <typename Op>
__device__ __forceinline__ void begin_sending(const Block<Op>& block, Begun<Op>& begun) {
    begun.notifies = block.notifiers.has_this_block();
    const uint32_t first_sender = begun.notifies ? kRouterWarps : 0;
    begun.sends = block.senders.has_this_block() && warp_idx() >= first_sender;
    if (begun.sends) {
        fetch(block, block.senders.unit(warp_idx() - first_sender), begun.outgoing);
    }
    begun.expert = kNowhere;
    if (begun.notifies) {
        const typename Op::Source source = block.source(first_notified(block));
        if (threadIdx.x < source.tokens() * block.shape.top_k) {
            begun.expert = expert_of_entry(block, source, threadIdx.x);
        }
    }
    if (threadIdx.x == 0) {
        block.shared.next_send = num_warps() - first_sender;
    }
}

template <typename Op>
__device__ void send_all(const Block<Op>& block, Begun<Op>& begun) {
    if (begun.notifies) {
        notify_all(block, begun.expert);
    }
    if (!begun.sends) {
        return;
    }
    while (is_left(block, begun.outgoing)) {
        send_chunk(block, begun.outgoing);
        fetch(block, block.senders.next_unit(&block.shared.next_send), begun.outgoing);
    }
}

}  // namespace nccl_ep::ll_dispatch_impl
