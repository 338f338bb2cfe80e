// The scheduler of a combine's block: which warp takes which row, as rows become ready in no known order.
#pragma once

#include "../peer/poll.cuh"
#include "rings.cuh"

namespace nccl_ep {

// The progress of a block. The rows of each sequence are dealt to the blocks in turn; the warps of a block take its
// rows of a sequence in order, but only rows that are ready.
struct Scheduler {
    // How many turns of each sequence were taken.
    uint32_t next[MAX_PEERS];
};

// The row of a sequence that this block takes in turn `turn`.
__device__ __forceinline__ uint32_t row_of_turn(const BlockRange& share, uint32_t peer, uint32_t turn) {
    return turn * share.blocks + (share.index() + peer) % share.blocks;
}

// A row that a warp has taken.
struct TakenRow {
    // The other rank of its sequence; kNoPeer if nothing was ready.
    uint32_t peer;
    uint32_t index;
    // If nothing was ready: a peer with rows left, kNoPeer if there is none.
    uint32_t left;
};

// The sequences whose rows are dealt to the blocks of `share`, as one of these blocks sees them.
struct Sequences {
    Scheduler& scheduler;
    // The number of rows of each sequence.
    const uint32_t* counts;
    const BlockRange& share;
    uint32_t ranks;
};

// One warp tries once to take a row for which `is_ready(peer, index, turn)` holds.
template <typename Ready>
__device__ __forceinline__ TakenRow try_next_row(const Sequences& sequences, Ready is_ready) {
    TakenRow work = {kNoPeer, 0, kNoPeer};
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
            // Warps begin with different peers, so that not all try to take the same row.
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

// Takes a row, waiting until one is ready; kNoPeer if none is left or the operation has failed. While none is ready it
// calls `idle`, which can end the wait by returning true. `awaited` lacks only the peer.
template <typename Ready, typename Idle>
__device__ __forceinline__ TakenRow next_row(const HtCommon& common, Awaited awaited, const Sequences& sequences,
                                             Ready is_ready, Idle idle) {
    TakenRow work;
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
