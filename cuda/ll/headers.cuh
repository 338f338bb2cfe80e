// Over several nodes: the headers of the operation's messages.
#pragma once

#include "protocol.cuh"

namespace nccl_ep {

// That of a message of this rank.
template <typename Op>
__device__ __forceinline__ MessageHeader header_of_operation(const Op& op, uint32_t tokens) {
    const LlCommon& common = op.common;
    return {op.nodes.nodes.handle, tokens, common.fingerprint, common.channel, common.scales_word, op.epoch, 0, 0};
}

// The header that this thread looks at first, loaded before it is needed.
template <typename Op>
__device__ __forceinline__ MessageHeader first_header(const Op& op) {
    return threadIdx.x + 1 < op.nodes.nodes.sources ? op.nodes.header(threadIdx.x + 1) : MessageHeader{};
}

// Whether the messages of all sources have arrived. All threads call it before the block relays anything.
template <typename Op>
__device__ inline bool sources_arrived(const Op& op, const MessageHeader& first) {
    const LlNodes& nodes = op.nodes.nodes;
    return all_arrived(nodes.sources - 1, [&](uint32_t i) {
        const MessageHeader header = i == threadIdx.x ? first : op.nodes.header(i + 1);
        const uint32_t rank = nodes.rank_of_source[i + 1];
        return Op::Net::arrived(op.common, header, header_of_operation(op, 0), op.from(rank, WAIT_BEGIN), rank);
    });
}

// After a relay of sums: the last block sends them. All threads call it.
template <typename Op>
__device__ inline void finish_relay(const Op& op) {
    const LlNodes& nodes = op.nodes.nodes;
    __syncthreads();
    const uint32_t last = op.common.receive_blocks - 1;
    const bool finished_last =
        threadIdx.x == 0 &&
        inc_acq_rel_gpu(&op.common.channel_state->blocks_relayed, last) == last;
    if (__syncthreads_or(finished_last) != 0 && !has_failed(op.common.wait)) {
        for (uint32_t i = 1 + threadIdx.x; i < nodes.sources; i += blockDim.x) {
            Op::Net::send(op.nodes.rows_message(i), header_of_operation(op, 0));
        }
    }
}

// Whether the sums of all rail peers have arrived; the epoch tells, as all else was compared when the operation began.
// All threads call it.
template <typename Op>
__device__ inline bool sums_arrived(const Op& op) {
    const LlNodes& nodes = op.nodes.nodes;
    return all_arrived(nodes.other_nodes, [&](uint32_t i) {
        const uint32_t rank = nodes.rail_peers[i];
        const MessageHeader ours = header_of_operation(op, 0);
        MessageHeader header = ours;
        header.epoch = header_of(op.nodes.returned_message(i + 1)).epoch;
        return Op::Net::arrived(op.common, header, ours, op.from(rank, WAIT_ROW), rank);
    });
}

}  // namespace nccl_ep
