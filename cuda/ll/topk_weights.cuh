// Finds the weight with which each dispatched entry of a token takes part in a combine.
//
// A combine reads the ids again: since the dispatch the caller may have masked some, or reordered a token's pairs of id
// and weight. Entry k of the combine means the dispatched entry with the same id. Of repeated ids the first means the
// first entry with that id, the second the second, and any further ones the last. If several mean the same entry, their
// weights are added, k ascending.
#pragma once

#include "protocol.cuh"

namespace nccl_ep {

// In place of a weight: the entry is masked. A NaN that no arithmetic yields, nor a caller's weight (caller_weight).
constexpr uint32_t kMasked = 0x7fedcba9u;

// How a dispatched entry takes part in a combine; each lane has one entry of a token.
struct TopkWeight {
    // The expert that has its row, or kNowhere.
    int32_t expert;
    // The factor of its row; is_masked() if it takes no part.
    float weight;
    // Its position in the order of the combine's ids; all lanes differ.
    uint32_t order;
};

__device__ __forceinline__ bool is_masked(float weight) {
    return __float_as_uint(weight) == kMasked;
}

// A caller's weight, with another NaN in place of kMasked.
__device__ __forceinline__ float caller_weight(float weight) {
    return is_masked(weight) ? __uint_as_float(kMasked ^ 1u) : weight;
}

// The TopkWeight of each lane's dispatched entry if the combine has other ids; `now` and `weight` are the expert and
// the weight of the combine's entry lane_idx(). Not inlined, as it seldom runs.
__device__ __noinline__ static TopkWeight match_entries(int32_t expert, uint32_t top_k, int32_t now, float weight) {
    TopkWeight topk = {expert, __uint_as_float(kMasked), top_k + lane_idx()};
    const LaneMask same = match(expert);
    const uint32_t nth = same.count_before();
    const uint32_t nth_now = match(now).count_before();
#pragma unroll 1
    for (uint32_t k = 0; k < top_k; ++k) {
        const int32_t id = shuffle(now, k);
        const uint32_t meant = min(shuffle(nth_now, k), same.count() - 1);
        const float added = shuffle(weight, k);
        if (id == kNowhere || id != expert || meant != nth) {
            continue;
        }
        if (is_masked(topk.weight)) {
            topk.weight = added;
            topk.order = k;
        } else {
            topk.weight += added;
        }
    }
    return topk;
}

// The words that a TopkWeight is made of, loaded ahead so that other loads can follow at once.
struct TopkLoads {
    int32_t sent;
    int64_t now;
    float weight;

    // Loads those of this lane's entry of this rank's token `token`.
    __device__ __forceinline__ void load(const LlCombineParams& params, uint32_t token) {
        const uint32_t top_k = params.common.shape.top_k;
        const uint32_t entry = token * top_k + lane_idx();
        sent = kNowhere;
        now = kNowhere;
        weight = 0.0f;
        if (lane_idx() >= top_k) {
            return;
        }
        sent = params.common.handle.expert_of[entry];
        if (params.weights != nullptr) {  // else the output is discarded, or rank-major rows have no weights
            now = __ldg(reinterpret_cast<const long long*>(params.topk_idx) + entry);
            weight = params.weights[entry];
        }
    }
};

// The expert to which an entry was dispatched, or kNowhere. Checked, as the handle's memory is undefined if no dispatch
// has run.
template <typename Op>
__device__ __forceinline__ int32_t dispatched_expert(const Op& op, int32_t sent) {
    return expert_of_id(sent, int64_t{op.ranks()} * op.common.shape.local_experts);
}

template <typename Op>
__device__ __forceinline__ TopkWeight make_topk_weight(const Op& op, const TopkLoads& words) {
    const int32_t expert = dispatched_expert(op, words.sent);
    const int32_t now =
        expert_of_id(words.now, int64_t{op.ranks()} * op.common.shape.local_experts);
    const float weight = caller_weight(words.weight);
    return any_lane(now != expert) ? match_entries(expert, op.common.shape.top_k, now, weight)
                                   : TopkWeight{expert, weight, lane_idx()};
}

// The TopkWeight of an entry of source `number`, another rank: its weights came over the network.
template <typename Op>
__device__ __forceinline__ TopkWeight topk_weight_of_source(const Op& op, uint32_t number, uint32_t token) {
    const LlShape& shape = op.common.shape;
    if (lane_idx() >= shape.top_k) {
        return {kNowhere, 0.0f, lane_idx()};
    }
    const float* weights =
        reinterpret_cast<const float*>(body_of(op.nodes.weights_message(number)));
    const int32_t expert = dispatched_expert(op, op.experts_of(number, token)[lane_idx()]);
    return {expert, weights[token * shape.top_k + lane_idx()], lane_idx()};
}

// The lane that comes at position lane_idx() when lanes are sorted by `order`.
__device__ __noinline__ static uint32_t lane_in_order(uint32_t order) {
    uint32_t position = 0;
    uint32_t from = lane_idx();
#pragma unroll 1
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
        position += shuffle(order, lane) < order;
    }
#pragma unroll 1
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
        from = shuffle(position, lane) == lane_idx() ? lane : from;
    }
    return from;
}

}  // namespace nccl_ep
