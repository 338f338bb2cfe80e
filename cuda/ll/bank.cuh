// The layout of a bank, the part of every rank's window that one operation uses, and the content of entry packets.
//
// Each bank begins with its rows, in slots. This rank reads its own bank, Bank<Own>, and writes to those of its peers,
// Bank<Remote>.
#pragma once

#include "../base/expert.cuh"
#include "../base/row.cuh"
#include "../peer/peer.cuh"
#include "params/ll.h"

namespace nccl_ep {

__device__ __forceinline__ RowFormat row_format(const LlShape& shape) {
    return {shape.row_bytes, shape.chunk_bytes};
}

// An entry packet's data: the local expert in the high bits, below them the index of the entry's row among those that
// its source sends to this expert, or rank-major to this rank.
struct EntryWord {
    static constexpr uint32_t kIndexBits = LL_INDEX_BITS;
    static constexpr uint32_t kMaxIndex = (1u << kIndexBits) - 1;
    // The entry's expert is on another rank, or the entry has none.
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

// The slots of a bank. A dispatched row has one slot at each rank that it goes to. In a combine, each expert rank's sum
// for a token has a slot at the token's home or its forwarder; in exact mode each entry's row has one.
struct BankSlots {
    const LlShape& shape;
    // Ranks of this node.
    uint32_t peers;

    __device__ uint32_t of_token(uint32_t source, uint32_t token) const {
        return source * shape.max_tokens + token;
    }
    // The sum from `peer`, at the forwarder of the token's rank, whose source `number` that rank is.
    __device__ uint32_t of_sum(uint32_t number, uint32_t token, uint32_t peer) const {
        return (number * shape.max_tokens + token) * peers + peer;
    }
    __device__ uint32_t of_entry(uint32_t token, uint32_t k) const {
        return token * shape.top_k + k;
    }
};

// A row of a bank and its flags, which are packets: one for each chunk or, for rows with scales, four.
template <template <typename> class Address>
struct BankRow {
    Address<uint8_t> data;
    Address<uint64_t> flags;
};

template <template <typename> class Address>
struct Bank {
    const LlCommon& common;
    Address<uint8_t> base;

    __device__ BankRow<Address> row(uint32_t slot) const {
        return {base + uint64_t{slot} * common.shape.slot_bytes,
                as<uint64_t>(base + common.layout.flags) + uint64_t{slot} * common.shape.flags};
    }
    // The rows of `source` for each local expert, then its number of tokens, its fingerprint and, if any, its scales
    // word.
    __device__ Address<uint64_t> counts(uint32_t source) const {
        return as<uint64_t>(base + common.layout.counts) +
               source * (common.shape.local_experts + LL_COUNTS_BESIDE_EXPERTS);
    }
    __device__ Address<uint64_t> fingerprint(uint32_t source) const {
        return counts(source) + common.shape.local_experts + 1;
    }
    __device__ Address<uint64_t> scales_word(uint32_t source) const {
        return counts(source) + common.shape.local_experts + 2;
    }
    // An EntryWord for each entry of token `token` of `source`.
    __device__ Address<uint64_t> entries(uint32_t source, uint32_t token) const {
        return as<uint64_t>(base + common.layout.entries) +
               (uint64_t{source} * common.shape.max_tokens + token) * LL_MAX_TOP_K;
    }
    // Rank-major: the weights of token `token` of `source`; they are behind the entries of all ranks.
    __device__ Address<uint64_t> weights(uint32_t source, uint32_t token, uint32_t ranks) const {
        return entries(ranks + source, token);
    }
};

// The handle's word with the epoch of its last rank-major dispatch if that filled a bank of views, else 0.
__device__ __forceinline__ uint32_t* filled_by(const LlCommon& common, uint32_t ranks) {
    return common.handle.tokens_of + ranks;
}

}  // namespace nccl_ep
