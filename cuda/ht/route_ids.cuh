// The experts and ranks that ids name, for the ids of several tokens in the lanes of a warp.
#pragma once

#include "../base/row.cuh"
#include "../base/expert.cuh"
#include "../base/warp.cuh"
#include "../peer/peer.cuh"

namespace nccl_ep::ht_route_impl {

// How the lanes of a warp are divided among tokens: each token has as many lanes as ids, rounded up to a power of two.
struct Lanes {
    uint32_t of_token;
    uint32_t top_k;

    __device__ explicit Lanes(uint32_t ids) : of_token(1), top_k(ids) {
        while (of_token < ids) {
            of_token *= 2;
        }
    }
    __device__ uint32_t tokens() const { return kWarpSize / of_token; }
    // This lane's token, its k, and the token's first lane.
    __device__ uint32_t token() const { return lane_idx() / of_token; }
    __device__ uint32_t k() const { return lane_idx() % of_token; }
    __device__ uint32_t first() const { return lane_idx() - k(); }
    // The lanes of earlier tokens, and those of this token before this lane.
    __device__ LaneMask earlier() const { return {(1u << first()) - 1}; }
    __device__ LaneMask before() const { return {((1u << lane_idx()) - 1) & ~earlier().bits}; }
    // All lanes of this lane's token.
    __device__ LaneMask own() const { return {(~0u >> (kWarpSize - of_token)) << first()}; }
};

// What this lane's id names.
struct LaneExpert {
    // The expert and its rank; both kNowhere if there is none, or an earlier id of the token names the same expert.
    int32_t expert;
    int32_t rank;
    // The lanes with the same rank; and the lanes that stand for a row, one for each rank of each token.
    LaneMask same_rank;
    LaneMask rows;

    // All lanes call it.
    __device__ __forceinline__ LaneExpert(const PeerTable& peers, uint32_t local_experts, const Lanes& lanes,
                                          int64_t id) {
        expert = expert_of_id(id, peers.ranks * local_experts);
        const LaneMask same = match(expert);
        expert = (same & lanes.before()).any() ? kNowhere : expert;
        rank = kNowhere;
        if (expert != kNowhere) {
            rank = static_cast<int32_t>(divide(expert, local_experts, 0xffffffffu / local_experts).quotient);
            if (!is_active(peers, rank)) {
                expert = kNowhere;
                rank = kNowhere;
            }
        }
        same_rank = match(rank);
        rows = ballot(rank != kNowhere && !(same_rank & lanes.before()).any());
    }
};

}  // namespace nccl_ep::ht_route_impl
