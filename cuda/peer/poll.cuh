// How the lanes of a warp divide the polling of words from all peers: each peer gets a few lanes, and as many peers are
// polled at once as lanes allow. Peers are numbered from the rank after this one on.
#pragma once

#include "peer.cuh"

namespace nccl_ep {

constexpr uint32_t kNoPeer = 0xffffffffu;

struct PollLanes {
    // Lanes per peer, a power of two, and its exponent: the largest with which all peers have lanes, or one lane.
    uint32_t shift = 5;
    uint32_t lanes;
    // Peers to poll.
    uint32_t others;

    __device__ explicit PollLanes(uint32_t ranks) : others(ranks - 1) {
        while (shift > 0 && others << shift > kWarpSize) {
            --shift;
        }
        lanes = 1u << shift;
    }
    __device__ uint32_t peers_at_once() const { return kWarpSize >> shift; }
    // This lane's peer, of the peers from number `base` on; kNoPeer if it has none.
    __device__ uint32_t peer(const PeerTable& peers, uint32_t base) const {
        const uint32_t number = base + (lane_idx() >> shift);
        const uint32_t rank = peers.rank + 1 + number;
        const uint32_t peer = rank < peers.ranks ? rank : rank - peers.ranks;
        return number < others && is_active(peers, peer) ? peer : kNoPeer;
    }
    // This lane's index among the lanes of its peer, and the first of these lanes.
    __device__ uint32_t index() const { return lane_idx() & (lanes - 1); }
    __device__ uint32_t first_lane() const { return lane_idx() - index(); }

    // How many lanes of this lane's peer have `ok` before the first that has not. All lanes call it; what any of them
    // has observed before comes before what all do afterwards.
    __device__ __forceinline__ uint32_t leading(bool ok) const {
        sync_warp();
        return min(lanes, ballot(ok).run_from(first_lane()));
    }
};

}  // namespace nccl_ep
