// Which blocks of a grid send and which receive, and in what order they take units of work.
//
// Stores to peers fill the queue between an SM and NVLink, and every load of that SM waits behind them; so
// with much to send, few blocks send and others receive.
#pragma once

#include "protocol.cuh"

namespace nccl_ep {

__device__ __forceinline__ Share senders_of(const LlCommon& common) {
    return {0, common.send_blocks};
}

__device__ __forceinline__ Share receivers_of(const LlCommon& common) {
    return {gridDim.x - common.receive_blocks, common.receive_blocks};
}

// Those between, which tell the peers what comes.
__device__ __forceinline__ Share tellers_of(const LlCommon& common) {
    return {common.send_blocks, gridDim.x - common.receive_blocks - common.send_blocks};
}

// How many units of kChunks chunks a row has.
struct Units {
    uint32_t count;
    uint32_t reciprocal;
};
template <uint32_t kChunks>
__device__ __forceinline__ Units units_of_row(const LlShape& shape) {
    if constexpr (kChunks == 1) {
        return {shape.chunks, shape.chunks_reciprocal};
    }
    const uint32_t count = (shape.chunks + kChunks - 1) / kChunks;
    return {count, ~uint32_t{0} / count};
}

// A unit of a token of some rank: number `unit` of those of all ranks. Which rank comes first differs from
// rank to rank, so that not all work on the same one, and pseudo-randomly from token to token: blocks take
// every n-th unit, so otherwise a block could get the tokens of one rank only, which may have few.
struct UnitOfAll {
    uint32_t rank;
    uint32_t token;
    // Of the row.
    uint32_t number;

    template <typename Op>
    __device__ UnitOfAll(const Op& op, const Units& of_row, uint32_t unit) {
        constexpr uint32_t kGoldenRatio = 0x9e3779b1u;  // of 2^32: its multiples are spread evenly
        const LlShape& shape = op.common.shape;
        const Divided pair = divide(unit, of_row.count, of_row.reciprocal);
        number = pair.remainder;
        const Divided at = divide(pair.quotient, op.ranks(), shape.ranks_reciprocal);
        token = at.quotient;
        const uint32_t turned = uint64_t{token * kGoldenRatio} * op.ranks() >> 32;
        // Each addend is less than the number of ranks: cheaper than a remainder.
        rank = at.remainder + op.rank();
        rank -= rank >= op.ranks() ? op.ranks() : 0;
        rank += turned;
        rank -= rank >= op.ranks() ? op.ranks() : 0;
    }
};

// For each peer that lanes name, the first lane that does; a negative one names nothing.
__device__ __forceinline__ LaneMask first_of_each_peer(int32_t peer) {
    const LaneMask same = match(peer);
    const bool first = peer >= 0 && same.first() == lane_idx();
    return ballot(first);
}

}  // namespace nccl_ep
