// How a sending block keeps track of credits: which slots of its peers' rings are free.
//
// The block polls each ring from its oldest row on, a few slots at a time and all rings alike, and a row may be sent
// only once all rows before it have credits, too. So no block runs ahead with rows that their receiver cannot use yet,
// and no peer gets a burst while the others get nothing: both cost more than waiting
// (docs/development/high-throughput.md). One poll serves the whole block, because on an SM that stores to peers every
// poll waits behind the stores. Only combines with very many senders poll for each row separately.
#pragma once

#include "../peer/poll.cuh"
#include "staging.cuh"

namespace nccl_ep {

// Whether `peer` has given the credits of the slot that begins at unit `sequence`. No acquire is needed: stores after
// the credit was seen cannot reach the peer's loads from before it was given.
__device__ __forceinline__ bool is_credited(const HtCommon& common, uint32_t peer,
                                            uint32_t sequence) {
    const uint64_t credits = ld_relaxed_sys(own_rings(common).credits(peer, sequence));
    const uint32_t end = sequence + kSlotUnits - common.layout.units;
    return is_or_follows(static_cast<uint32_t>(credits >> 32), end) &&
           is_or_follows(static_cast<uint32_t>(credits), end - 1);
}

// Whether the block knows of the credits for unit `sequence` to `peer` up to the end of its slot, as a row that begins
// a slot needs both.
__device__ __forceinline__ bool has_credit(const HtPairs& pairs, uint32_t peer, uint32_t sequence) {
    const uint32_t end_of_slot = (sequence | (kSlotUnits - 1)) + 1;
    return is_or_follows(ld_acquire_cta_shared(&pairs.credited_until[peer]), end_of_slot);
}

// One warp polls for the credits of the next slots of every ring. It polls slots, not units, so that it need not know
// the size of rows.
template <typename Staging>
__device__ inline void poll_credits(const HtCommon& common, HtPairs& pairs) {
    const PeerTable& peers = common.peers;
    const PollLanes poll(peers.ranks);
    for (uint32_t base = 0; base < poll.others; base += poll.peers_at_once()) {
        const uint32_t peer = poll.peer(peers, base);
        // The beginning of a slot, as operations begin with a new one.
        uint32_t known = peer != kNoPeer ? ld_relaxed_cta_shared(&pairs.credited_until[peer]) : 0;
        known = shuffle(known, poll.first_lane());
        const uint32_t sequence = known + kSlotUnits * poll.index();
        const bool ok = peer != kNoPeer && is_credited(common, peer, sequence);
        const uint32_t units = kSlotUnits * poll.leading(ok);
        // Another warp may have stored a later number, which this one replaces; the next poll finds it again.
        if (poll.index() == 0 && units != 0) {
            st_release_cta_shared(&pairs.credited_until[peer], known + units);
        }
        Staging::converge();
    }
    sync_warp();
}

}  // namespace nccl_ep
