// Where things lie in a bank: the part of every rank's window that one operation uses.
//
// Each bank begins with its rows. Bank<Own> is this rank's, to read; Bank<Remote> a peer's, to write.
#pragma once

#include "../base/row.cuh"
#include "../peer/peer.cuh"

namespace nccl_ep {

__device__ __forceinline__ RowFormat row_format(const LlShape& shape) {
    return {shape.row_bytes, shape.chunk_bytes};
}

// A row of a bank, and the flags of its chunks, a packet each.
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
                as<uint64_t>(base + common.layout.flags) + uint64_t{slot} * common.shape.chunks};
    }
    // Rows of `source` per local expert, then its tokens, its fingerprint, and its scales word if it has one.
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
    // What `source` says about each entry of its token `token`.
    __device__ Address<uint64_t> entries(uint32_t source, uint32_t token) const {
        return as<uint64_t>(base + common.layout.entries) +
               (uint64_t{source} * common.shape.max_tokens + token) * LL_MAX_TOP_K;
    }
    // Rank-major: the weights of the token `token` of `source`, behind all entries.
    __device__ Address<uint64_t> weights(uint32_t source, uint32_t token, uint32_t ranks) const {
        return entries(ranks + source, token);
    }
};

}  // namespace nccl_ep
