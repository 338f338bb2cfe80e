// The tail: what follows a row of a forward dispatch in its slot. For each of the token's experts on the
// receiving rank it holds the expert's local id and its weight.
//
// Which experts these are was fixed when the handle was made; their weights come with the dispatch.
#pragma once

#include "entries.cuh"

namespace nccl_ep {

// One entry per lane; past the last expert -1 and zero.
struct RoutingEntry {
    int32_t id;
    float weight;

    __device__ RoutingEntry(int32_t local_id, float of_it) : id(local_id), weight(of_it) {}

    // What is sent to the rank whose first expert is in `lane`; `lane_weight` is the weight of each
    // lane's expert. All lanes call it.
    __device__ RoutingEntry(const HtCommon& common, const TokenEntries& entries, uint32_t lane,
                            float lane_weight) {
        const uint32_t from = (lane + lane_idx()) % kWarpSize;
        const int32_t expert = shuffle(entries.entry.expert, from);
        const float expert_weight = shuffle(lane_weight, from);
        const bool is_there = lane_idx() < entries.experts_from(lane);
        id = is_there ? static_cast<int32_t>(place_of_expert(common, expert).remainder) : -1;
        weight = is_there ? expert_weight : 0.0f;
    }

    // As it has come. A caller indexes by the id, so one that names no expert of this rank is none.
    __device__ RoutingEntry(const HtCommon& common, uint64_t packed)
        : id(static_cast<int32_t>(packed)),
          weight(__uint_as_float(static_cast<uint32_t>(packed >> 32))) {
        id = static_cast<uint32_t>(id) < common.layout.local_experts ? id : -1;
    }
    __device__ uint64_t packed() const {
        return uint64_t{__float_as_uint(weight)} << 32 | static_cast<uint32_t>(id);
    }
};

// Where the ids and weights of a token are.
struct RoutingAt {
    const int64_t* ids;
    const float* weights;
};

// The ids and weights of a token as the caller gives them, one of each per lane. An id that names no expert is -1.
struct GivenRouting {
    int32_t id = -1;
    float weight = 0.0f;

    __device__ GivenRouting() {}
    __device__ GivenRouting(const RoutingAt& at, uint32_t top_k) {
        if (lane_idx() < top_k) {
            const int64_t given = at.ids[lane_idx()];
            id = given == static_cast<int32_t>(given) ? static_cast<int32_t>(given) : -1;
            weight = at.weights[lane_idx()];
        }
    }

    // The weight of this lane's expert, which callers name `expert`: the sum, by ascending k, over the ids that name
    // it; zero if none does. The first is not added to zero: a single weight keeps its bits, also those of -0 and NaN.
    // All lanes call it.
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
