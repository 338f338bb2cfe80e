// How the warps of a block share out rows that become ready in an order of their own.
#pragma once

#include "ht.cuh"

namespace nccl_ep {

// The rows of all sequences, dealt to the blocks of a share in turn; within a block its warps take
// them one after the other, of each sequence in order, but only rows that are ready.
struct Claims {
    // Turns that were taken.
    uint32_t next[MAX_PEERS];
};

// The row of a sequence that the block takes at its turn number `turn`.
__device__ __forceinline__ uint32_t row_of_turn(const Share& share, uint32_t peer, uint32_t turn) {
    return turn * share.blocks + (share.index() + peer) % share.blocks;
}

struct Claimed {
    // kNoPeer: nothing was ready, and if `left` is kNoPeer too, nothing is left.
    uint32_t peer;
    uint32_t index;
    uint32_t left;
};

// One warp looks once for a row that is ready: `is_ready(peer, index, turn)` tells. `counts` are the
// rows of each sequence.
template <typename Ready>
__device__ __forceinline__ Claimed try_claim(Claims& claims, const uint32_t* counts,
                                             const Share& share, uint32_t ranks, Ready is_ready) {
    Claimed claimed = {kNoPeer, 0, kNoPeer};
    for (uint32_t base = 0; base < ranks; base += kWarpSize) {
        const uint32_t peer = base + lane_idx();
        uint32_t turn = 0;
        uint32_t index = 0;
        bool left = false;
        if (peer < ranks) {
            turn = ld_relaxed_cta_shared(&claims.next[peer]);
            index = row_of_turn(share, peer, turn);
            left = index < counts[peer];
        }
        const bool ready = left && is_ready(peer, index, turn);
        const uint32_t with_rows = __ballot_sync(kAllLanes, left);
        if (claimed.left == kNoPeer && with_rows != 0) {
            claimed.left = base + __ffs(with_rows) - 1;
        }
        uint32_t candidates = __ballot_sync(kAllLanes, ready);
        while (candidates != 0) {
            // Warps begin at different peers, lest all go for the same row.
            const uint32_t above = candidates & (kAllLanes << (warp_idx() % kWarpSize));
            const uint32_t lane = __ffs(above != 0 ? above : candidates) - 1;
            bool won = false;
            if (lane_idx() == lane) {
                won = atomicCAS(&claims.next[peer], turn, turn + 1) == turn;
            }
            if (__ballot_sync(kAllLanes, won) != 0) {
                claimed.peer = base + lane;
                claimed.index = __shfl_sync(kAllLanes, index, lane);
                __syncwarp();
                return claimed;
            }
            candidates &= ~(1u << lane);
        }
    }
    return claimed;
}

// Takes a row, waiting until one is ready; kNoPeer when none is left or the operation has failed.
// `idle` is called between two looks; `awaited` lacks only the peer.
template <typename Ready, typename Idle>
__device__ __forceinline__ Claimed claim(const HtCommon& common, Awaited awaited, Claims& claims,
                                         const uint32_t* counts, const Share& share, uint32_t ranks,
                                         Ready is_ready, Idle idle) {
    Claimed claimed;
    const auto look = [&] {
        claimed = try_claim(claims, counts, share, ranks, is_ready);
        if (claimed.peer != kNoPeer || claimed.left == kNoPeer) {
            return true;
        }
        awaited.peer = claimed.left;
        idle();
        return false;
    };
    if (!wait_as_warp(common, awaited, look)) {
        claimed.peer = kNoPeer;
    }
    return claimed;
}

}  // namespace nccl_ep
