// Over several nodes: whether messages belong to the operation, by their headers, and the header of what goes back.
#pragma once

#include "protocol.cuh"

namespace nccl_ep {

// Whether source `number` runs this operation, by its head. An exchange that was ended leaves
// what lay there before, of an earlier epoch.
template <typename Op>
__device__ inline bool head_fits(const Op& op, uint32_t number, const MessageHeader& head) {
    const LlNodes& nodes = op.nodes.nodes;
    const Awaited awaited = op.from(nodes.rank_of_source[number], WAIT_BEGIN);
    if (head.channel != op.common.channel) {
        report_difference(op.common, FAULT_STAGED_DIFFERS, awaited, 0, 0);
    } else if (head.epoch != op.epoch) {
        report_difference(op.common, FAULT_RAIL_PEER_FAILED, awaited, op.epoch, awaited.peer);
    } else if (head.handle != nodes.handle) {
        report_difference(op.common, FAULT_HANDLE_DIFFERS, awaited, nodes.handle, head.handle);
    } else if (head.fingerprint != op.common.fingerprint ||
               head.scales_word != op.common.scales_word) {
        report_difference(op.common, FAULT_DIFFERS, awaited, op.common.fingerprint, head.fingerprint,
                          head.scales_word);
    } else {
        return true;
    }
    return false;
}

// The head that this thread looks at first, loaded before it is needed.
template <typename Op>
__device__ __forceinline__ MessageHeader first_head(const Op& op) {
    return threadIdx.x + 1 < op.nodes.nodes.sources ? op.nodes.head(threadIdx.x + 1) : MessageHeader{};
}

// Whether all sources run this operation. All threads call it before the block relays anything: what came over
// the network has the right size also if it belongs to another operation.
template <typename Op>
__device__ inline bool sources_agree(const Op& op, const MessageHeader& first) {
    bool differs = false;
    for (uint32_t i = threadIdx.x; i + 1 < op.nodes.nodes.sources; i += blockDim.x) {
        const MessageHeader head = i == threadIdx.x ? first : op.nodes.head(i + 1);
        differs |= !head_fits(op, i + 1, head);
    }
    return __syncthreads_or(differs) == 0;
}

// After a relay of sums: the last block says in front of them that they are complete. All threads call it.
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
            *reinterpret_cast<MessageHeader*>(op.nodes.rows_message(i)) = {
                nodes.handle, 0, 0, op.common.channel, 0, op.epoch, 0, 0};
        }
    }
}

// Whether the rail peers have sent sums of this operation, and not what lay there before. All threads call it.
template <typename Op>
__device__ inline bool rail_peers_succeeded(const Op& op) {
    const LlNodes& nodes = op.nodes.nodes;
    bool failed = false;
    for (uint32_t i = threadIdx.x; i < nodes.other_nodes; i += blockDim.x) {
        const MessageHeader& head = head_of(op.nodes.returned_message(i + 1));
        if (head.epoch != op.epoch) {
            const Awaited awaited = op.from(nodes.rail_peers[i], WAIT_ROW);
            report_difference(op.common, FAULT_RAIL_PEER_FAILED, awaited, op.epoch, nodes.rail_peers[i]);
            failed = true;
        }
    }
    return __syncthreads_or(failed) == 0;
}

}  // namespace nccl_ep
