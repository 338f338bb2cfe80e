// The sending half of a dispatch: a warp takes a token and stores its row to the rings of all its peers. If it casts
// the row, it also stores it to this rank's output.
#pragma once

#include "dispatch_block.cuh"

namespace nccl_ep::ht_dispatch_impl {

// What a warp loads of its next token well in advance, as loads wait behind the SM's stores.
template <typename Block>
struct Upcoming {
    uint32_t token;
    typename Block::TokenLocation location;
    HtEntry entry;
    CallerRouting given;
    typename Block::Prefetched prefetched;
};

// A token that a warp is about to send. The lane of a rank's first expert knows where the row goes on that rank.
template <typename Block>
struct Outgoing {
    uint32_t token;
    typename Block::TokenLocation location;
    TokenEntries entries;
    CallerRouting given;
    typename Block::Prefetched prefetched;

    __device__ bool is_left(const Block& block) const {
        return any_lane(token < block.common.handle.tokens);
    }
    __device__ bool goes_to_peer(const Block& block) const {
        return entries.is_first() && static_cast<uint32_t>(entries.rank) != block.rank();
    }
    __device__ LaneMask to_peers(const Block& block) const {
        return ballot(goes_to_peer(block));
    }
    // Whether senders have to handle the token.
    __device__ bool is_sent(const Block& block) const {
        return Block::kSenderStoresLocal ? entries.firsts.any() : to_peers(block).any();
    }
    __device__ const uint8_t* row(const Block& block) const {
        return block.row_of_token(token, location);
    }
    __device__ uint32_t sequence(const Block& block) const {
        return unit_of_row(AnyUnits{block.common}, block.shared.pairs.sent[entries.rank],
                           entries.entry.index);
    }
};

template <typename Block>
__device__ __forceinline__ Upcoming<Block> next_token(const Block& block) {
    const uint32_t token = block.senders.next_unit(&block.shared.next_token);
    const typename Block::TokenLocation location = block.scope.location(block.common, token);
    return {token, location, TokenEntries::load_entry(block.common.handle, token),
            block.caller_routing(token, location), block.rows.prefetch(block, token, location)};
}

// Takes the next token that is to be sent, and starts to load its row. `upcoming` is the token that the warp has
// prefetched.
template <typename Block>
__device__ __forceinline__ Outgoing<Block> fetch(const Block& block, Upcoming<Block>& upcoming,
                                                 Staging& staging) {
    for (;;) {
        const Outgoing<Block> outgoing = {
            upcoming.token, upcoming.location, {block.common, upcoming.entry}, upcoming.given,
            upcoming.prefetched};
        if (!outgoing.is_left(block)) {
            return outgoing;
        }
        upcoming = next_token(block);
        if (outgoing.is_sent(block)) {
            staging.wait_reusable();
            block.rows.load(block, outgoing.row(block), 0, staging);
            return outgoing;
        }
    }
}

// Writes the tails to shared memory, one for each peer; `weight` is that of each lane's expert.
template <typename Block>
__device__ void write_tails(const Block& block, const Outgoing<Block>& outgoing, float weight, Staging& staging) {
    uint64_t* tail = reinterpret_cast<uint64_t*>(staging.tails());
    for (LaneMask left = outgoing.to_peers(block); left.any(); left.drop_first()) {
        const RoutingEntry routing(block.common, outgoing.entries, left.first(), weight);
        if (lane_idx() < block.top_k()) {
            tail[lane_idx()] = routing.packed();
        }
        tail += block.common.shape.tail_bytes / sizeof(uint64_t);
    }
}

// The lanes whose peer has not given credit for the row yet.
template <typename Block>
__device__ __forceinline__ LaneMask without_credit(const Block& block, const Outgoing<Block>& outgoing) {
    return ballot(outgoing.goes_to_peer(block) &&
                  !has_credit(block.shared.pairs, outgoing.entries.rank, outgoing.sequence(block)));
}

// If the row stays on this rank, too, stores a chunk of it to the output, and with the first chunk ids and weights.
template <typename Block>
__device__ __forceinline__ void store_local_chunk(const Block& block, const Outgoing<Block>& outgoing,
                                                  float weight, uint32_t offset, const uint8_t* chunk,
                                                  Staging& staging) {
    const LocalRow local(block, outgoing.entries);
    if (!local.is_here) {
        return;
    }
    const uint32_t bytes = block.rows.bytes_at(block.common, offset);
    block.rows.deliver(block, local.row(block), offset, bytes, chunk, staging);
    if (offset == 0) {
        local.write_routing(block, outgoing.entries, weight);
    }
}

// Stores the row, whose first chunk is being loaded, and its tails to all peers; with kSenderStoresLocal also to this
// rank's output.
template <typename Block>
__device__ void store_row(const Block& block, const Outgoing<Block>& outgoing, float weight, Staging& staging) {
    const HtCommon& common = block.common;
    const auto& rows = block.rows;
    Remote<uint8_t> slot;
    if (outgoing.goes_to_peer(block)) {
        slot = rings_at(common, outgoing.entries.rank)
                   .row(block.rank(), outgoing.sequence(block));
    }
    const LaneMask peers = outgoing.to_peers(block);
    for (uint32_t offset = 0; offset < rows.span(common); offset += rows.step(common)) {
        if (offset != 0) {
            staging.commit();
            staging.wait_reusable();
            rows.load(block, outgoing.row(block), offset, staging);
        }
        const uint8_t* chunk = rows.finish(block, outgoing, offset, staging);
        for (LaneMask left = peers; left.any(); left.drop_first()) {
            staging.store_shared(chunk, remote_of_lane(slot, left.first()) + offset,
                                 rows.bytes_at(common, offset));
        }
        if constexpr (Block::kSenderStoresLocal) {
            store_local_chunk(block, outgoing, weight, offset, chunk, staging);
        }
    }
    const uint8_t* tail = staging.tails();
    const LaneMask tails = peers.only_if(common.shape.tail_bytes != 0);
    for (LaneMask left = tails; left.any(); left.drop_first()) {
        staging.store_shared(tail, remote_of_lane(slot, left.first()) + common.shape.row_bytes,
                             common.shape.tail_bytes);
        tail += common.shape.tail_bytes;
    }
    staging.commit();
}

template <typename Block>
__device__ void send_rows(const Block& block, Staging& staging, NotifyQueue& queue) {
    const HtCommon& common = block.common;
    // Begins with a token and a stored row that go nowhere, so that the loop needs no prologue.
    Upcoming<Block> upcoming = {0, {}, {-1, 0}, {}, {}};
    bool to_peer = false;
    Notification stored = {0, 0};
    // Lanes without credit; after the loop, those whose wait the warp has given up.
    LaneMask without;
    WaitLimit limit;
    for (bool gives_up = false;;) {
        const Outgoing<Block> outgoing = fetch(block, upcoming, staging);
        queue.enqueue(to_peer, stored.peer, stored.sequence);
        const bool is_left = outgoing.is_left(block);
        without = without_credit(block, outgoing);
        // Peers may wait for the rows enqueued before they give credits.
        if (!is_left || without.any()) {
            queue.flush();
        }
        if (!is_left) {
            break;
        }
#pragma unroll 1
        for (limit = {}; without.any() && !gives_up;) {
            poll_credits_at_pace<Staging>(common, block.shared.pairs);
            gives_up = limit.is_over(common.wait);
            without = gives_up ? without : without_credit(block, outgoing);
        }
        if (gives_up) {
            stored.peer = outgoing.entries.rank;
            staging.wait_loaded();
            break;
        }
        float weight = 0.0f;
        if (common.shape.tail_bytes != 0) {
            weight = weight_of_lane(block, outgoing.entries, outgoing.given);
            write_tails(block, outgoing, weight, staging);
            staging.settle();
        }
        store_row(block, outgoing, weight, staging);
        to_peer = outgoing.goes_to_peer(block);
        stored = {static_cast<uint32_t>(outgoing.entries.rank),
                  to_peer ? outgoing.sequence(block) : 0};
        sync_warp();
    }
    queue.close();
    if (without.any()) {
        limit.report(common, {WAIT_CREDIT, shuffle(stored.peer, without.first()), block.shared.pairs.operation});
    }
}

}  // namespace nccl_ep::ht_dispatch_impl
