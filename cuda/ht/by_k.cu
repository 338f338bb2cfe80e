// Reorders the gradients of a token's weights from ascending experts to the order of its ids: each id gets its expert's
// gradient, even if another id names the same expert, and an id that names none gets zero.
//
// Grid: any; one warp per token at a time, one lane per id. In place, as all lanes load before one stores.

#include "../base/entry.cuh"
#include "../base/expert.cuh"
#include "../base/warp.cuh"
#include "params/ht_kept.h"

namespace nccl_ep::ht_by_k_impl {

// How many distinct experts of the token are below this lane's expert.
__device__ uint32_t experts_below(int32_t expert, uint32_t top_k) {
    uint32_t below = 0;
#pragma unroll 1
    for (uint32_t k = 0; k < top_k; ++k) {
        const int32_t other = shuffle(expert, k);
        const LaneMask same = ballot(expert == other);
        below += other != kNowhere && other < expert && same.first() == k ? 1 : 0;
    }
    return below;
}

ENTRY(ht_by_k) {
    const uint32_t warps = gridDim.x * num_warps();
    const uint32_t top_k = params.top_k;
    for (uint32_t token = blockIdx.x * num_warps() + warp_idx(); token < params.tokens; token += warps) {
        const uint64_t first = uint64_t{token} * top_k;
        int32_t expert = kNowhere;
        float gradient = 0.0f;
        if (lane_idx() < top_k) {
            expert = expert_of_id(params.topk_idx[first + lane_idx()], params.experts);
            gradient = params.gradients[first + lane_idx()];
        }
        gradient = shuffle(gradient, experts_below(expert, top_k));
        if (lane_idx() < top_k) {
            params.gradients[first + lane_idx()] = expert != kNowhere ? gradient : 0.0f;
        }
    }
}

}  // namespace nccl_ep::ht_by_k_impl
