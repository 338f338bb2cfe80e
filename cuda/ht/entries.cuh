// The experts of a token, as a warp sees them.
#pragma once

#include "../base/row.cuh"
#include "rings.cuh"

namespace nccl_ep {

// The rank of an expert, as the quotient, and its number there, as the remainder.
__device__ __forceinline__ DivMod locate_expert(const HtCommon& common, uint32_t expert) {
    return divide(expert, common.layout.local_experts, common.layout.expert_reciprocal);
}

// A token's experts, one in each lane, ascending; so the ranks that the token goes to ascend as well.
struct TokenEntries {
    HtEntry entry;
    int32_t rank;
    // The lanes with an expert, and those of them whose expert is the token's first on its rank.
    LaneMask valid;
    LaneMask firsts;

    __device__ TokenEntries(const HtCommon& common, uint32_t token)
        : TokenEntries(common, load_entry(common.handle, token)) {}

    // Construction in two steps: load_entry loads a lane's entry ahead, and the constructor takes it.
    __device__ static HtEntry load_entry(const HtHandleMemory& handle, uint32_t token) {
        if (token < handle.tokens && lane_idx() < handle.top_k) {
            return handle.entries[uint64_t{token} * handle.top_k + lane_idx()];
        }
        return {-1, 0};
    }
    __device__ TokenEntries(const HtCommon& common, const HtEntry& entry_of_lane)
        : entry(entry_of_lane) {
        rank = entry.expert < 0 ? -1 : static_cast<int32_t>(locate_expert(common, entry.expert).quotient);
        const int32_t before = shuffle(rank, (lane_idx() + kWarpSize - 1) % kWarpSize);
        valid = ballot(rank >= 0);
        firsts = ballot(rank >= 0 && (lane_idx() == 0 || before != rank));
    }
    __device__ bool is_first() const { return firsts.has_this(); }
    // How many experts the token has on the rank whose first one is in `lane`.
    __device__ uint32_t experts_from(uint32_t lane) const {
        const LaneMask later = firsts.behind(lane);
        return (later.any() ? later.first() : valid.count()) - lane;
    }
};

}  // namespace nccl_ep
