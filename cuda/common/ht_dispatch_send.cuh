// The sending side of a dispatch: a warp takes a token, loads its row once and stores it to the rings
// of all its peers.
#pragma once

#include "ht_dispatch_block.cuh"

namespace nccl_ep::ht_dispatch_impl {

// What is known of a token: loaded well before it is needed, as loads wait behind the SM's stores.
struct Upcoming {
    uint32_t token;
    HtEntry entry;
    GivenRouting given;
};

// A token that a warp is about to send, and in each lane that is a rank's first, where it goes there.
struct Outgoing {
    uint32_t token;
    TokenEntries entries;
    GivenRouting given;

    __device__ bool is_left(const Block& block) const {
        return token < block.common.handle.tokens;
    }
    __device__ bool goes_to_peer(const Block& block) const {
        return entries.is_first() && static_cast<uint32_t>(entries.rank) != block.rank();
    }
    __device__ uint32_t to_peers(const Block& block) const {
        return __ballot_sync(kAllLanes, goes_to_peer(block));
    }
    __device__ uint32_t sequence(const Block& block) const {
        return block.shared.pairs.sent[entries.rank] + entries.entry.place;
    }
};

__device__ __forceinline__ Upcoming next_token(const Block& block) {
    const uint32_t token = block.senders.next_unit(&block.shared.next_token);
    return {token, TokenEntries::load_entry(block.common.handle, token),
            block.given_routing(token)};
}

// Takes the next token that goes to any peer, and starts loading its row. `upcoming` is the warp's.
__device__ __forceinline__ Outgoing fetch(const Block& block, Upcoming& upcoming,
                                          Carrier& carrier) {
    for (;;) {
        const Outgoing outgoing = {upcoming.token, {block.common, upcoming.entry}, upcoming.given};
        if (!outgoing.is_left(block)) {
            return outgoing;
        }
        upcoming = next_token(block);
        if (outgoing.to_peers(block) != 0) {
            carrier.wait_reusable();
            load_piece(block, outgoing.token, 0, carrier);
            return outgoing;
        }
    }
}

// Prepares in the tails what each peer gets to know.
__device__ void write_tails(const Block& block, const Outgoing& outgoing, Carrier& carrier) {
    const float weight = outgoing.given.weight_of(outgoing.entries, block.top_k());
    uint64_t* tail = reinterpret_cast<uint64_t*>(carrier.tails());
    for (uint32_t left = outgoing.to_peers(block); left != 0; left &= left - 1) {
        const RoutingEntry routing(block.common, outgoing.entries, __ffs(left) - 1, weight);
        if (lane_idx() < block.top_k()) {
            tail[lane_idx()] = routing.packed();
        }
        tail += block.common.tail_bytes / sizeof(uint64_t);
    }
}

// Whether the row has a slot at the lane's peer, if it goes to one.
__device__ __forceinline__ bool has_place(const Block& block, const Outgoing& outgoing) {
    return !outgoing.goes_to_peer(block) ||
           has_place(block.shared.pairs, outgoing.entries.rank, outgoing.sequence(block));
}

// Waits until the row has a slot at all its peers. Before, what has departed is announced.
__device__ bool wait_for_places(const Block& block, const Outgoing& outgoing, Mailbox& mailbox) {
    if (__ballot_sync(kAllLanes, has_place(block, outgoing)) == kAllLanes) {
        return true;
    }
    mailbox.flush();
    Awaited awaited = {WAIT_PLACE, kNoPeer, block.shared.pairs.operation};
    return wait_as_warp(block.common, awaited, [&] {
        look_for_places(block.ring, block.shared.pairs);
        const uint32_t without = ~__ballot_sync(kAllLanes, has_place(block, outgoing));
        if (without != 0) {
            awaited.peer = __shfl_sync(kAllLanes, outgoing.entries.rank, __ffs(without) - 1);
        }
        return without == 0;
    });
}

// Stores the row, whose first piece was loaded, and what belongs to it to all its peers.
__device__ void store_row(const Block& block, const Outgoing& outgoing, Carrier& carrier) {
    const HtCommon& common = block.common;
    uint8_t* slot = nullptr;
    if (outgoing.goes_to_peer(block)) {
        slot = block.ring.row(outgoing.entries.rank, block.rank(), outgoing.sequence(block));
    }
    const uint32_t peers = outgoing.to_peers(block);
    for (uint32_t offset = 0; offset < common.row_bytes; offset += common.piece_bytes) {
        if (offset != 0) {
            carrier.commit();
            carrier.wait_reusable();
            load_piece(block, outgoing.token, offset, carrier);
        }
        carrier.wait_loaded();
        for (uint32_t left = peers; left != 0; left &= left - 1) {
            carrier.store(pointer_of_lane(slot, __ffs(left) - 1) + offset,
                          min(common.row_bytes - offset, common.piece_bytes));
        }
    }
    const uint8_t* tail = carrier.tails();
    for (uint32_t left = common.tail_bytes != 0 ? peers : 0; left != 0; left &= left - 1) {
        carrier.store_shared(tail, pointer_of_lane(slot, __ffs(left) - 1) + common.row_bytes,
                             common.tail_bytes);
        tail += common.tail_bytes;
    }
    carrier.commit();
}

__device__ void send_rows(const Block& block, Carrier& carrier, Mailbox& mailbox) {
    Upcoming upcoming = next_token(block);
    Outgoing outgoing = fetch(block, upcoming, carrier);
    while (outgoing.is_left(block)) {
        if (block.common.tail_bytes != 0) {
            write_tails(block, outgoing, carrier);
        }
        const bool ok = wait_for_places(block, outgoing, mailbox);
        carrier.settle_tails();
        if (!ok) {
            carrier.wait_loaded();
            break;
        }
        store_row(block, outgoing, carrier);
        const Outgoing next = fetch(block, upcoming, carrier);
        const bool to_peer = outgoing.goes_to_peer(block);
        mailbox.depart(to_peer, outgoing.entries.rank, to_peer ? outgoing.sequence(block) : 0);
        outgoing = next;
    }
    mailbox.close();
}

}  // namespace nccl_ep::ht_dispatch_impl
