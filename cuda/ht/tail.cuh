// The tail that follows a row of a dispatch in its slot: for each of the token's experts on the receiving rank, the
// expert's local id and its weight. The handle fixes the experts; the weights come with the dispatch.
#pragma once

#include "entries.cuh"

namespace nccl_ep {

// An entry of a tail, one per lane; past the last expert -1 and zero.
struct RoutingEntry {
    int32_t id;
    float weight;

    __device__ RoutingEntry(int32_t local_id, float of_it) : id(local_id), weight(of_it) {}

    // This lane's entry in the tail for the rank whose first expert is in `lane`; `lane_weight` is the weight of each
    // lane's expert. All lanes call it.
    __device__ RoutingEntry(const HtCommon& common, const TokenEntries& entries, uint32_t lane,
                            float lane_weight) {
        const uint32_t from = (lane + lane_idx()) % kWarpSize;
        const int32_t expert = shuffle(entries.entry.expert, from);
        const float expert_weight = shuffle(lane_weight, from);
        const bool is_there = lane_idx() < entries.experts_from(lane);
        id = is_there ? static_cast<int32_t>(locate_expert(common, expert).remainder) : -1;
        weight = is_there ? expert_weight : 0.0f;
    }

    // An entry that has arrived. Callers index by the id, so one that names no expert of this rank becomes -1.
    __device__ RoutingEntry(const HtCommon& common, uint64_t packed)
        : id(static_cast<int32_t>(packed)),
          weight(__uint_as_float(static_cast<uint32_t>(packed >> 32))) {
        id = static_cast<uint32_t>(id) < common.layout.local_experts ? id : -1;
    }
    __device__ uint64_t packed() const {
        return uint64_t{__float_as_uint(weight)} << 32 | static_cast<uint32_t>(id);
    }
};

// Pointers to a token's ids and weights.
struct RoutingPointers {
    const int64_t* ids;
    const float* weights;
};

// The caller's ids and weights of a token, one of each per lane. An id of more than 32 bits, which names no expert,
// becomes -1.
struct CallerRouting {
    int32_t id = -1;
    float weight = 0.0f;

    __device__ CallerRouting() {}
    __device__ CallerRouting(const RoutingPointers& at, uint32_t top_k) {
        if (lane_idx() < top_k) {
            const int64_t given = at.ids[lane_idx()];
            id = given == static_cast<int32_t>(given) ? static_cast<int32_t>(given) : -1;
            weight = at.weights[lane_idx()];
        }
    }

    // The weight of this lane's expert, whose id is `expert`: the sum, by ascending k, over the ids that name it; zero
    // if none does. The first is not added to zero, so that a single weight keeps its bits, including those of -0 and
    // NaN. All lanes call it.
    __device__ float weight_of(int32_t expert, uint32_t top_k) const {
        float found = 0.0f;
        bool is_named = false;
#pragma unroll 1
        for (uint32_t k = 0; k < top_k; ++k) {
            const int32_t other_id = shuffle(id, k);
            const float other_weight = shuffle(weight, k);
            if (other_id == expert) {
                found = is_named ? found + other_weight : other_weight;
                is_named = true;
            }
        }
        return found;
    }
};

}  // namespace nccl_ep
