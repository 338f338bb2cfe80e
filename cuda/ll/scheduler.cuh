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

// A chunk of a token of some rank: number `unit` of those of all ranks. Which rank comes first differs from
// rank to rank, so that not all work on the same one, and pseudo-randomly from token to token: blocks take
// every n-th unit, so otherwise a block could get the tokens of one rank only, which may have few.
struct UnitOfAll {
    uint32_t rank;
    uint32_t token;
    uint32_t chunk_idx;

    template <typename Op>
    __device__ UnitOfAll(const Op& op, uint32_t unit) {
        constexpr uint32_t kGoldenRatio = 0x9e3779b1u;  // of 2^32: its multiples are spread evenly
        const uint32_t pair = unit / op.common.shape.chunks;
        chunk_idx = unit % op.common.shape.chunks;
        token = pair / op.ranks();
        const uint32_t turned = uint64_t{token * kGoldenRatio} * op.ranks() >> 32;
        // Each of the three is less than the number of ranks: cheaper than a remainder.
        rank = pair % op.ranks() + op.rank();
        rank -= rank >= op.ranks() ? op.ranks() : 0;
        rank += turned;
        rank -= rank >= op.ranks() ? op.ranks() : 0;
    }
};

// Lanes that are the first of their warp to name `peer`; a negative one names nothing.
__device__ __forceinline__ LaneMask first_of_each_peer(int32_t peer) {
    const LaneMask same = match(peer);
    const bool first = peer >= 0 && same.first() == lane_idx();
    return ballot(first);
}

}  // namespace nccl_ep
