// The scheduler of a block of a combine: which warp takes which row, where rows become ready in no known order.
#pragma once

#include "../peer/poll.cuh"
#include "rings.cuh"

namespace nccl_ep {

// The rows of all sequences, dealt to the blocks of a share in turn. The warps of a block take the rows of
// each sequence in order, but only rows that are ready.
struct Scheduler {
    // Turns of each sequence that were taken.
    uint32_t next[MAX_PEERS];
};

// The row of a sequence that the block takes at its turn number `turn`.
__device__ __forceinline__ uint32_t row_of_turn(const Share& share, uint32_t peer, uint32_t turn) {
    return turn * share.blocks + (share.index() + peer) % share.blocks;
}

// The row that a warp has taken.
struct Work {
    // kNoPeer: nothing was ready, and if `left` is kNoPeer too, nothing is left.
    uint32_t peer;
    uint32_t index;
    uint32_t left;
};

// The sequences whose rows are dealt to the blocks of a share, as one of these sees them.
struct Sequences {
    Scheduler& scheduler;
    // Rows of each.
    const uint32_t* counts;
    const Share& share;
    uint32_t ranks;
};

// One warp looks once for a row for which `is_ready(peer, index, turn)` holds.
template <typename Ready>
__device__ __forceinline__ Work try_next_row(const Sequences& sequences, Ready is_ready) {
    Work work = {kNoPeer, 0, kNoPeer};
    for (uint32_t base = 0; base < sequences.ranks; base += kWarpSize) {
        const uint32_t peer = base + lane_idx();
        uint32_t turn = 0;
        uint32_t index = 0;
        bool left = false;
        if (peer < sequences.ranks) {
            turn = ld_relaxed_cta_shared(&sequences.scheduler.next[peer]);
            index = row_of_turn(sequences.share, peer, turn);
            left = index < sequences.counts[peer];
        }
        const bool ready = left && is_ready(peer, index, turn);
        const LaneMask with_rows = ballot(left);
        if (with_rows.any() && work.left == kNoPeer) {
            work.left = base + with_rows.first();
        }
        LaneMask candidates = ballot(ready);
        while (candidates.any()) {
            // Warps begin at different peers, so that not all try to take the same row.
            const uint32_t lane = candidates.first_from(warp_idx() % kWarpSize);
            bool won = false;
            if (lane_idx() == lane) {
                won = atomicCAS(&sequences.scheduler.next[peer], turn, turn + 1) == turn;
            }
            if (ballot(won).any()) {
                work.peer = base + lane;
                work.index = shuffle(index, lane);
                sync_warp();
                return work;
            }
            candidates.drop(lane);
        }
    }
    return work;
}

// Takes a row, waiting until one is ready; kNoPeer when none is left or the operation has failed. While none is
// ready `idle` is called; it ends the wait by returning true. `awaited` lacks only the peer.
template <typename Ready, typename Idle>
__device__ __forceinline__ Work next_row(const HtCommon& common, Awaited awaited, const Sequences& sequences,
                                         Ready is_ready, Idle idle) {
    Work work;
    const auto look = [&] {
        work = try_next_row(sequences, is_ready);
        awaited.peer = work.left;
        return work.peer != kNoPeer || work.left == kNoPeer || idle();
    };
    if (!wait_as_warp(common, awaited, look)) {
        work.peer = kNoPeer;
    }
    return work;
}

}  // namespace nccl_ep
