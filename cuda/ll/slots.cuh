// What an entry's packet says, and the slot of the bank through which its row travels.
#pragma once

#include "../base/expert.cuh"
#include "../peer/peer.cuh"
#include "params/ll.h"

namespace nccl_ep {

// An entry packet's data: the local expert in the high bits, below them the entry's index among the rows
// that its source sends to this expert.
struct EntryWord {
    static constexpr uint32_t kIndexBits = LL_INDEX_BITS;
    static constexpr uint32_t kMaxIndex = (1u << kIndexBits) - 1;
    // The entry's expert is on another rank, or there is none.
    static constexpr uint32_t kElsewhere = 0xffffffffu;

    uint32_t data;

    __device__ static EntryWord here(uint32_t expert, uint32_t index) {
        return {expert << kIndexBits | (index < kMaxIndex ? index : kMaxIndex)};
    }
    __device__ static EntryWord elsewhere() { return {kElsewhere}; }
    __device__ bool is_here() const { return data != kElsewhere; }
    __device__ uint32_t expert() const { return data >> kIndexBits; }
    __device__ uint32_t index() const { return data & kMaxIndex; }
};

// The slots of a bank. In dispatch a token's row has one slot at each rank that it goes to; in combine each
// expert rank's sum has one at the token's home or its forwarder, or, in exact mode, each entry's row.
struct BankSlots {
    const LlShape& shape;
    // Ranks of a node.
    uint32_t peers;

    __device__ uint32_t of_token(uint32_t source, uint32_t token) const {
        return source * shape.max_tokens + token;
    }
    // At the forwarder of the token's rank, whose source that is, from `peer`.
    __device__ uint32_t of_sum(uint32_t number, uint32_t token, uint32_t peer) const {
        return (number * shape.max_tokens + token) * peers + peer;
    }
    __device__ uint32_t of_entry(uint32_t token, uint32_t k) const {
        return token * shape.top_k + k;
    }
};

}  // namespace nccl_ep
