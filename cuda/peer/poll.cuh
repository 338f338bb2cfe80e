// How the lanes of a warp divide the polling of words from all peers: each peer gets a few lanes, and as many peers are
// polled at once as lanes allow. Peers are numbered from the rank after this one on.
#pragma once

#include "peer.cuh"

namespace nccl_ep {

constexpr uint32_t kNoPeer = 0xffffffffu;

struct PollLanes {
    // Lanes per peer.
    uint32_t lanes;
    // Peers to poll.
    uint32_t others;

    __device__ explicit PollLanes(uint32_t ranks) : lanes(kWarpSize), others(ranks - 1) {
        while (lanes > 1 && lanes * others > kWarpSize) {
            lanes /= 2;
        }
    }
    __device__ uint32_t peers_at_once() const { return kWarpSize / lanes; }
    // This lane's peer, of the peers from number `base` on; kNoPeer if it has none.
    __device__ uint32_t peer(const PeerTable& peers, uint32_t base) const {
        const uint32_t number = base + lane_idx() / lanes;
        const uint32_t peer = number < others ? (peers.rank + 1 + number) % peers.ranks : kNoPeer;
        return peer != kNoPeer && is_active(peers, peer) ? peer : kNoPeer;
    }
    // This lane's index among the lanes of its peer, and the first of these lanes.
    __device__ uint32_t index() const { return lane_idx() % lanes; }
    __device__ uint32_t first_lane() const { return lane_idx() - index(); }

    // How many lanes of this lane's peer have `ok` before the first that has not. All lanes call it; what any of them
    // has observed before comes before what all do afterwards.
    __device__ __forceinline__ uint32_t leading(bool ok) const {
        sync_warp();
        return min(lanes, ballot(ok).run_from(first_lane()));
    }
};

}  // namespace nccl_ep
