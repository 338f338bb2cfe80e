// How a dispatch sends: a warp takes a token, and stores its row to the rings of all its peers. Where it casts the
// row, it also stores it to this rank's output.
#pragma once

#include "dispatch_block.cuh"

namespace nccl_ep::ht_dispatch_impl {

// What is known of a token: loaded well before it is needed, as loads wait behind the SM's stores.
template <typename Block>
struct Upcoming {
    uint32_t token;
    typename Block::Place place;
    HtEntry entry;
    GivenRouting given;
    typename Block::Ahead ahead;
};

// A token that a warp is about to send; lanes that are a rank's first know where it goes there.
template <typename Block>
struct Outgoing {
    uint32_t token;
    typename Block::Place place;
    TokenEntries entries;
    GivenRouting given;
    typename Block::Ahead ahead;

    __device__ bool is_left(const Block& block) const {
        return any_lane(token < block.common.handle.tokens);
    }
    __device__ bool goes_to_peer(const Block& block) const {
        return entries.is_first() && static_cast<uint32_t>(entries.rank) != block.rank();
    }
    __device__ LaneMask to_peers(const Block& block) const {
        return ballot(goes_to_peer(block));
    }
    // Whether senders have anything to do with it.
    __device__ bool is_sent(const Block& block) const {
        return Block::kKeptBySender ? entries.firsts.any() : to_peers(block).any();
    }
    __device__ const uint8_t* row(const Block& block) const {
        return block.row_of_token(token, place);
    }
    __device__ uint32_t sequence(const Block& block) const {
        return unit_of_row(AnyUnits{block.common}, block.shared.pairs.sent[entries.rank],
                           entries.entry.index);
    }
};

template <typename Block>
__device__ __forceinline__ Upcoming<Block> next_token(const Block& block) {
    const uint32_t token = block.senders.next_unit(&block.shared.next_token);
    const typename Block::Place place = block.scope.place(block.common, token);
    return {token, place, TokenEntries::load_entry(block.common.handle, token),
            block.given_routing(token, place), block.rows.look_ahead(block, token, place)};
}

// Takes the next token that is sent, and starts loading its row. `upcoming` is the warp's.
template <typename Block>
__device__ __forceinline__ Outgoing<Block> fetch(const Block& block, Upcoming<Block>& upcoming,
                                                 Staging& staging) {
    for (;;) {
        const Outgoing<Block> outgoing = {
            upcoming.token, upcoming.place, {block.common, upcoming.entry}, upcoming.given,
            upcoming.ahead};
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

// Prepares the tails, one for each peer; `weight` is that of each lane's expert.
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

// The lanes whose peer has given no credit for the row yet.
template <typename Block>
__device__ __forceinline__ LaneMask without_credit(const Block& block, const Outgoing<Block>& outgoing) {
    return ballot(outgoing.goes_to_peer(block) &&
                  !has_credit(block.shared.pairs, outgoing.entries.rank, outgoing.sequence(block)));
}

// Stores a chunk of the row, and with the first its ids and weights, to this rank's output, if it goes there.
template <typename Block>
__device__ __forceinline__ void keep_chunk(const Block& block, const Outgoing<Block>& outgoing,
                                           float weight, uint32_t offset, const uint8_t* chunk,
                                           Staging& staging) {
    const KeptRow kept(block, outgoing.entries);
    if (!kept.is_here) {
        return;
    }
    const uint32_t bytes = block.rows.bytes_at(block.common, offset);
    block.rows.deliver(block, kept.row(block), offset, bytes, chunk, staging);
    if (offset == 0) {
        kept.write_routing(block, outgoing.entries, weight);
    }
}

// Stores the row, whose first chunk is loaded, and its tails to all peers; and here, if senders keep rows.
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
        if constexpr (Block::kKeptBySender) {
            keep_chunk(block, outgoing, weight, offset, chunk, staging);
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
    // A token and a stored row that go nowhere, so that the loop needs no prologue.
    Upcoming<Block> upcoming = {0, {}, {-1, 0}, {}, {}};
    bool to_peer = false;
    Notification stored = {0, 0};
    // Lanes without credit; after the loop, those for which the warp has given up.
    LaneMask without;
    Patience patience;
    for (bool gives_up = false;;) {
        const Outgoing<Block> outgoing = fetch(block, upcoming, staging);
        queue.depart(to_peer, stored.peer, stored.sequence);
        const bool is_left = outgoing.is_left(block);
        without = without_credit(block, outgoing);
        // Peers may wait for what has departed, before they give credits.
        if (!is_left || without.any()) {
            queue.flush();
        }
        if (!is_left) {
            break;
        }
#pragma unroll 1
        for (patience = {}; without.any() && !gives_up;) {
            poll_credits<Staging>(common, block.shared.pairs);
            gives_up = patience.ends(common.wait);
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
        patience.report(common, {WAIT_CREDIT, shuffle(stored.peer, without.first()), block.shared.pairs.operation});
    }
}

}  // namespace nccl_ep::ht_dispatch_impl
