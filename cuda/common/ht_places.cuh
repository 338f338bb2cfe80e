// What a sending block knows of the free slots of its peers' rings.
//
// Each ring is looked at from its oldest row on, a few rows at a time and of all rings alike, and a row
// may be sent only once all rows before it have a slot, too. So no block runs ahead with rows that
// their receiver cannot use yet, and no peer gets a burst while the others get nothing: both cost more
// than waiting (docs/performance.md). One look serves the whole block, as where an SM stores to peers
// every look waits behind the stores. Only combine with very many senders looks for each row by itself.
#pragma once

#include "ht.cuh"

namespace nccl_ep {

// Whether the slot of row `sequence` to `peer` is free. A credit needs no acquire: what is written after
// it was seen cannot be what was read before it was given.
__device__ __forceinline__ bool is_free(const Ring& ring, uint32_t peer, uint32_t sequence) {
    const uint32_t credit = ld_relaxed_sys(ring.credit(ring.common.peers.rank, peer, sequence));
    return is_or_follows(credit, sequence + 1 - ring.common.layout.depth);
}

// Whether row `sequence` to `peer` has a free slot, as far as the block knows.
__device__ __forceinline__ bool has_place(const HtPairs& pairs, uint32_t peer, uint32_t sequence) {
    return is_or_follows(ld_acquire_cta_shared(&pairs.free_until[peer]), sequence + 1);
}

// One warp looks at the next rows of every ring.
__device__ inline void look_for_places(const Ring& ring, HtPairs& pairs) {
    const PeerTable& peers = ring.common.peers;
    const Lookout lookout(peers.ranks);
    for (uint32_t base = 0; base < lookout.others; base += lookout.peers_at_once()) {
        const uint32_t peer = lookout.peer(peers, base);
        uint32_t known = peer != kNoPeer ? ld_relaxed_cta_shared(&pairs.free_until[peer]) : 0;
        known = __shfl_sync(kAllLanes, known, lookout.first_lane());
        const bool has_slot = peer != kNoPeer && is_free(ring, peer, known + lookout.look());
        const uint32_t places = leading_looks(lookout, has_slot);
        // Another warp may know more by now. What is forgotten so is found again.
        if (lookout.look() == 0 && places != 0) {
            st_release_cta_shared(&pairs.free_until[peer], known + places);
        }
    }
    __syncwarp();
}

}  // namespace nccl_ep
