// How a sending block keeps track of credits: which slots of its peers' rings are free.
//
// The block polls each ring from its oldest row on, a few slots at a time and all rings alike, and a row may be sent
// only once all rows before it have credits, too. So no block runs ahead with rows that their receiver cannot use yet,
// and no peer gets a burst while the others get nothing: both cost more than waiting
// (docs/development/high-throughput.md). As a block has to pass all slots, those of other blocks' rows, too, each lane
// polls several at once where rows are short. One poll serves the whole block, because on an SM that stores to peers
// every poll waits behind the stores. Only combines with very many senders poll for each row separately.
#pragma once

#include "../peer/poll.cuh"
#include "staging.cuh"

namespace nccl_ep {

// Whether both `credits` of a slot are given for the one that begins at unit `sequence`.
__device__ __forceinline__ bool frees_slot(const HtCommon& common, uint64_t credits, uint32_t sequence) {
    const uint32_t end = sequence + kSlotUnits - common.layout.units;
    return is_or_follows(static_cast<uint32_t>(credits >> 32), end) &&
           is_or_follows(static_cast<uint32_t>(credits), end - 1);
}

// Whether `peer` has given the credits of the slot that begins at unit `sequence`. No acquire is needed: stores after
// the credit was seen cannot reach the peer's loads from before it was given.
__device__ __forceinline__ bool is_credited(const HtCommon& common, uint32_t peer, uint32_t sequence) {
    return frees_slot(common, ld_relaxed_sys(own_rings(common).credits(peer, sequence)), sequence);
}

// Whether the block knows of the credits for unit `sequence` to `peer` up to the end of its slot, as a row that begins
// a slot needs both.
__device__ __forceinline__ bool has_credit(const HtPairs& pairs, uint32_t peer, uint32_t sequence) {
    const uint32_t end_of_slot = (sequence | (kSlotUnits - 1)) + 1;
    return is_or_follows(ld_acquire_cta_shared(&pairs.credited_until[peer]), end_of_slot);
}

// How many slots from unit `sequence` on are free before the first that is not, of one slot or, if `polls_several`, of
// HT_POLLED_SLOTS that lie together; `credits` points to those of the first.
__device__ __forceinline__ uint32_t free_slots(const HtCommon& common, const uint64_t* credits, uint32_t sequence,
                                               bool polls_several) {
    uint64_t words[HT_POLLED_SLOTS];
    words[0] = ld_relaxed_sys(credits);
    if (!polls_several) {
        return frees_slot(common, words[0], sequence) ? 1 : 0;
    }
    // All are in flight together.
#pragma unroll
    for (uint32_t i = 1; i < HT_POLLED_SLOTS; ++i) {
        words[i] = ld_relaxed_sys(credits + i);
    }
    uint32_t count = 0;
#pragma unroll
    for (uint32_t i = 0; i < HT_POLLED_SLOTS; ++i) {
        count += count == i && frees_slot(common, words[i], sequence + i * kSlotUnits) ? 1 : 0;
    }
    return count;
}

// One warp polls for the credits of the next slots of every ring. It polls slots, not units, so that it need not know
// the size of rows.
template <typename Staging>
__device__ inline void poll_credits(const HtCommon& common, HtPairs& pairs) {
    const PeerTable& peers = common.peers;
    const bool polls_several = common.shape.polls_several != 0;
    const uint32_t slots = polls_several ? HT_POLLED_SLOTS : 1;
    const PollLanes poll(peers.ranks);
    for (uint32_t base = 0; base < poll.others; base += poll.peers_at_once()) {
        const uint32_t peer = poll.peer(peers, base);
        // The beginning of a slot, as operations begin with a new one.
        uint32_t known = peer != kNoPeer ? ld_relaxed_cta_shared(&pairs.credited_until[peer]) : 0;
        known = shuffle(known, poll.first_lane());
        // Whole groups of slots, which lie together: those before `known` still count as free.
        const uint32_t first = known & ~(kSlotUnits * slots - 1);
        const uint32_t sequence = first + kSlotUnits * slots * poll.index();
        uint32_t free = 0;
        if (peer != kNoPeer) {
            free = free_slots(common, own_rings(common).credits(peer, sequence), sequence, polls_several);
        }
        const uint32_t full = poll.leading(free == slots);
        uint32_t until = first + kSlotUnits * slots * full;
        if (polls_several) {
            const uint32_t of_next = shuffle(free, poll.first_lane() + (full & (poll.lanes - 1)));
            until += full < poll.lanes ? kSlotUnits * of_next : 0;
        }
        // Another warp may have stored a later number, which this one replaces; the next poll finds it again.
        if (poll.index() == 0 && until != known) {
            st_release_cta_shared(&pairs.credited_until[peer], until);
        }
        Staging::converge();
    }
    sync_warp();
}

// The poll of a sending warp that waits for credit, once in its loop.
template <typename Staging>
__device__ __forceinline__ void poll_credits_at_pace(const HtCommon& common, HtPairs& pairs) {
    pause_cycles(common.shape.sender_pause);
    poll_credits<Staging>(common, pairs);
}

}  // namespace nccl_ep
