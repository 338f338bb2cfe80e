// What ids name, as a warp sees those of several tokens at once.
#pragma once

#include "../base/row.cuh"
#include "../base/expert.cuh"
#include "../base/warp.cuh"
#include "../peer/peer.cuh"

namespace nccl_ep::ht_route_impl {

// How a warp looks at several tokens at once: each has as many lanes as a token has ids, filled up to a power of two.
struct Lanes {
    uint32_t of_token;
    uint32_t top_k;

    __device__ explicit Lanes(uint32_t ids) : of_token(1), top_k(ids) {
        while (of_token < ids) {
            of_token *= 2;
        }
    }
    __device__ uint32_t tokens() const { return kWarpSize / of_token; }
    // This lane's token of those, its number among the token's ids, and the token's first lane.
    __device__ uint32_t token() const { return lane_idx() / of_token; }
    __device__ uint32_t k() const { return lane_idx() % of_token; }
    __device__ uint32_t first() const { return lane_idx() - k(); }
    // The lanes of earlier tokens; and those of this token before this lane.
    __device__ LaneMask earlier() const { return {(1u << first()) - 1}; }
    __device__ LaneMask before() const { return {((1u << lane_idx()) - 1) & ~earlier().bits}; }
    // All of this lane's token.
    __device__ LaneMask own() const { return {(~0u >> (kWarpSize - of_token)) << first()}; }
};

// The ids of some tokens of a warp, one in each lane.
struct Named {
    // The expert, or kNowhere, also if an earlier id of the token names it; and its rank, or kNowhere.
    int32_t expert;
    int32_t rank;
    // Lanes with the same rank; and lanes that stand for a row, one for each rank of each token.
    LaneMask same_rank;
    LaneMask rows;

    // All lanes call it.
    __device__ __forceinline__ Named(const PeerTable& peers, uint32_t local_experts, const Lanes& lanes, int64_t id) {
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
