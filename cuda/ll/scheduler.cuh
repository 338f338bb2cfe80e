// Which blocks of a grid send and which receive, and in what order warps take units of work.
//
// Stores to peers fill the queue between an SM and NVLink, and every load of that SM waits behind them. So with much to
// send, few blocks send and the others receive.
#pragma once

#include "protocol.cuh"

namespace nccl_ep {

__device__ __forceinline__ BlockRange senders_of(const LlCommon& common) {
    return {0, common.send_blocks};
}

__device__ __forceinline__ BlockRange receivers_of(const LlCommon& common) {
    return {gridDim.x - common.receive_blocks, common.receive_blocks};
}

// The blocks between them, which notify the peers of what comes.
__device__ __forceinline__ BlockRange notifiers_of(const LlCommon& common) {
    return {common.send_blocks, gridDim.x - common.receive_blocks - common.send_blocks};
}

// The units of kChunks chunks in a row.
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

// Unit `unit` of all ranks' rows. The rank that comes first differs from rank to rank, so that not all of them load the
// same one, and pseudo-randomly from token to token: as blocks take every n-th unit, a block could otherwise get units
// of a single rank, which may have few tokens.
struct WorkUnit {
    uint32_t rank;
    uint32_t token;
    // Which unit of the token's row.
    uint32_t number;

    template <typename Op>
    __device__ WorkUnit(const Op& op, const Units& of_row, uint32_t unit) {
        constexpr uint32_t kGoldenRatio = 0x9e3779b1u;  // of 2^32: its multiples are spread evenly
        const LlShape& shape = op.common.shape;
        const DivMod pair = divide(unit, of_row.count, of_row.reciprocal);
        number = pair.remainder;
        const DivMod at = divide(pair.quotient, op.ranks(), shape.ranks_reciprocal);
        token = at.quotient;
        const uint32_t offset = uint64_t{token * kGoldenRatio} * op.ranks() >> 32;
        // Addends are below the number of ranks, so a subtraction does instead of a remainder.
        rank = at.remainder + op.rank();
        rank -= rank >= op.ranks() ? op.ranks() : 0;
        rank += offset;
        rank -= rank >= op.ranks() ? op.ranks() : 0;
    }
};

// The first lane with each peer; negative peers do not count.
__device__ __forceinline__ LaneMask first_of_each_peer(int32_t peer) {
    const LaneMask same = match(peer);
    const bool first = peer >= 0 && same.first() == lane_idx();
    return ballot(first);
}

}  // namespace nccl_ep
