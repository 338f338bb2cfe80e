// With which weight each entry of a token takes part in its combine.
//
// A combine reads the ids again: the caller may have masked some since the dispatch, or reordered a
// token's pairs of id and weight. Entry k of the combine means the dispatched entry with the same id: the
// first k with an id the first entry with it, the second the second, and any further ones the last. Where
// several mean one entry, their weights are added, k ascending.
#pragma once

#include "protocol.cuh"

namespace nccl_ep {

// Instead of a weight: the entry is masked. A NaN that neither arithmetic nor the caller yields (given_weight).
constexpr uint32_t kMasked = 0x7fedcba9u;

// One dispatched entry of a token, a lane each.
struct TopkWeight {
    // Who has its row, or kNowhere.
    int32_t expert;
    // What its row is multiplied by; is_masked for none.
    float weight;
    // Its position in the order of the combine's ids, different in all lanes.
    uint32_t order;
};

__device__ __forceinline__ bool is_masked(float weight) {
    return __float_as_uint(weight) == kMasked;
}

// A weight of the caller's, changed if it looks like that of a masked entry.
__device__ __forceinline__ float given_weight(float weight) {
    return is_masked(weight) ? __uint_as_float(kMasked ^ 1u) : weight;
}

// How each lane's dispatched entry takes part in a combine with other ids; `now` and `weight` are those of the
// combine's entry lane_idx(). Not inlined, as it is seldom done.
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

// The loads for a top-k weight. Nothing uses them yet, so that other loads can follow at once.
struct TopkWords {
    int32_t sent;
    int64_t now;
    float weight;

    // Of this lane's entry of `token` of this rank.
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
        if (params.weights != nullptr) {  // else what is received is thrown away, or has no weights (rank-major)
            now = __ldg(reinterpret_cast<const long long*>(params.topk_idx) + entry);
            weight = params.weights[entry];
        }
    }
};

// The expert of an entry as it was dispatched, or kNowhere. Checked, as the handle's memory is undefined if its
// dispatch has not run.
template <typename Op>
__device__ __forceinline__ int32_t dispatched_expert(const Op& op, int32_t sent) {
    return expert_of_id(sent, int64_t{op.ranks()} * op.common.shape.local_experts);
}

template <typename Op>
__device__ __forceinline__ TopkWeight make_topk_weight(const Op& op, const TopkWords& words) {
    const int32_t expert = dispatched_expert(op, words.sent);
    const int32_t now =
        expert_of_id(words.now, int64_t{op.ranks()} * op.common.shape.local_experts);
    const float weight = given_weight(words.weight);
    return any_lane(now != expert) ? match_entries(expert, op.common.shape.top_k, now, weight)
                                   : TopkWeight{expert, weight, lane_idx()};
}

// The same of source `number`, another rank: its own top-k weights came over the network.
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

// The lane whose entry comes at position lane_idx() when lanes are sorted by `order`.
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
