// The partial sums that other nodes return for this rank's tokens: for every token that went to a node, the rounded sum
// of the node's rows, and its experts' gradients. They are added to this node's sum. If nodes are summed in ascending
// order instead, this node's sum is rounded as well and kept in the output row, from which it is added in its place.
#pragma once

#include "../base/row.cuh"
#include "../base/warp.cuh"
#include "messages.cuh"

namespace nccl_ep {

// On one node.
struct NoPartials {
    static constexpr bool kNodes = false;
    __device__ uint32_t nodes() const { return 0; }
    __device__ static constexpr bool rounds_own_node() { return false; }
    __device__ static constexpr bool is_own(uint32_t) { return false; }
    __device__ const uint8_t* row(const RowFormat&, uint32_t, uint32_t) const { return nullptr; }
    __device__ uint32_t gradient(uint32_t, uint32_t, uint32_t here, uint32_t) const { return here; }
};

// The partial sums for the tokens of a stage; a stage of remote tokens has none.
struct NodePartials {
    static constexpr bool kNodes = true;
    const HtPartials& from;

    __device__ bool rounds_own_node() const { return from.own_place != OWN_NODE_FIRST; }
    // How many nodes' rows are added; their places in the sum count from 0.
    __device__ uint32_t nodes() const { return from.others + (rounds_own_node() ? 1 : 0); }
    // Whether the sum at `place` is this node's, which is in the output row.
    __device__ bool is_own(uint32_t place) const {
        return rounds_own_node() && place == from.own_place;
    }
    // Whether the sum at `place` is added before this node's, if that is rounded.
    __device__ bool is_before_own(uint32_t place) const { return place < from.own_place; }
    // The row at `place` for `token`, from another node; NULL if there is none.
    __device__ const uint8_t* row(const RowFormat& format, uint32_t token, uint32_t place) const {
        if (place >= nodes() || is_own(place)) {
            return nullptr;
        }
        uint32_t other = place;
        if (rounds_own_node()) {
            // One less than its distance.
            other = from.own_place - place - 1 + (place > from.own_place ? nodes() : 0);
        }
        uint32_t number = 0;
        return has_row(token, other, number)
                   ? first_row_of(from.messages, other) + format.offset(number)
                   : nullptr;
    }
    // The gradient of this lane's column; `here` has the gradients of the token's experts on this node, one per lane.
    // All lanes call it.
    __device__ uint32_t gradient(uint32_t token, uint32_t top_k, uint32_t here,
                                 uint32_t columns) const {
        if (from.expert_places == nullptr) {
            return here;
        }
        const uint32_t lane = lane_idx();
        const uint32_t expert_place = lane < top_k ? from.expert_places[uint64_t{token} * top_k + lane] : HT_NONE;
        const uint32_t place = expert_place & ((1u << HT_PLACE_BITS) - 1);
        const uint32_t of_lane = shuffle(here, place % kWarpSize);
        if (expert_place == HT_NONE || lane >= columns) {
            return 0;
        }
        const uint32_t node = expert_place >> HT_PLACE_BITS;
        uint32_t number = 0;
        if (node == 0 || !has_row(token, node - 1, number)) {
            return node == 0 ? of_lane : 0;
        }
        const uint8_t* tail = tail_of(from.messages, node - 1, number);
        return __float_as_uint(reinterpret_cast<const float*>(tail)[place]);
    }

   private:
    __device__ bool has_row(uint32_t token, uint32_t other, uint32_t& number) const {
        const uint32_t position = from.departing_index[uint64_t{other} * from.tokens + token];
        const uint32_t before = from.departing[other * from.chunk_ends];
        number = position - before;
        return position != HT_NONE;
    }
};

}  // namespace nccl_ep
