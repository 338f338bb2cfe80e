// Where the ranks of a group are: all on this node, or on several, with messages between the nodes. Kernels are
// templates over the two cases, so that those for one node pay nothing for the other.
//
// The ranks of this node are *peers*, numbered by local index: their windows are mapped. Every rank of the group has a
// *forwarder* on this node: itself, or its rail peer here. The forwarder sends the rank's rows to the peers and
// collects what they return. The ranks that this rank forwards for are its *sources*; source 0 is this rank itself.
#pragma once

#include "../base/row.cuh"
#include "../net/message.cuh"
#include "params/ll.h"

namespace nccl_ep {

// This rank as a source of a dispatch. It only refers to the parameters, which are operands of instructions; copies
// would take registers.
struct OwnSource {
    const LlDispatchParams& params;

    __device__ uint32_t number() const { return 0; }
    __device__ uint32_t rank() const { return params.common.peers.rank; }
    __device__ uint32_t tokens() const { return params.common.shape.tokens; }
    __device__ const int64_t* ids() const { return params.topk_idx; }
    __device__ const uint8_t* rows() const { return params.tokens; }
};

// Any source of a dispatch over several nodes.
struct ForwardedSource {
    uint32_t number_;
    uint32_t rank_;
    uint32_t tokens_;
    const int64_t* ids_;
    const uint8_t* rows_;

    __device__ uint32_t number() const { return number_; }
    __device__ uint32_t rank() const { return rank_; }
    __device__ uint32_t tokens() const { return tokens_; }
    __device__ const int64_t* ids() const { return ids_; }
    __device__ const uint8_t* rows() const { return rows_; }
};

// A group on one node: every rank is a peer and forwards only for itself.
struct OneNode {
    static constexpr bool kSeveral = false;
    static constexpr bool kWhole = false;
    using Net = NoNet;
    using Source = OwnSource;
    const PeerTable& peers;

    __device__ uint32_t ranks() const { return peers.ranks; }
    __device__ uint32_t rank() const { return peers.rank; }
    // The local index of `rank`, negative if it is on another node; kNowhere for kNowhere.
    __device__ int32_t peer_of(int32_t rank) const { return rank; }
    __device__ uint32_t rank_of_peer(uint32_t peer) const { return peer; }
    __device__ uint32_t forwarder_of(uint32_t rank) const { return rank; }
    // The number of `rank` as a source of its forwarder.
    __device__ uint32_t number_of(uint32_t) const { return 0; }
};

// OneNode for kernels that run whole operations only.
struct WholeOnOneNode : OneNode {
    static constexpr bool kWhole = true;
};

// A group over several nodes: tables say where ranks are, and messages of `Network` come from other nodes.
template <typename Network>
struct SeveralNodes {
    static constexpr bool kSeveral = true;
    static constexpr bool kWhole = false;
    using Net = Network;
    using Source = ForwardedSource;
    const LlNodes& nodes;
    const bool is_combine;

    __device__ const RankOnNode& at(uint32_t rank) const { return nodes.of_rank[rank]; }
    __device__ uint32_t ranks() const { return nodes.ranks; }
    __device__ uint32_t rank() const { return nodes.rank; }
    __device__ int32_t peer_of(int32_t rank) const { return rank < 0 ? rank : at(rank).peer; }
    __device__ uint32_t rank_of_peer(uint32_t peer) const { return nodes.rank_of_peer[peer]; }
    __device__ uint32_t forwarder_of(uint32_t rank) const { return at(rank).forwarder; }
    __device__ uint32_t number_of(uint32_t rank) const { return at(rank).number; }

    // The next four functions take sources from 1 on, as this rank has no messages with itself. In a dispatch, the
    // message with the rows from source `number`; in a combine, the one with the sums for it.
    __device__ uint8_t* rows_message(uint32_t number) const {
        return nodes.rows + (number - 1) * nodes.rows_stride;
    }
    __device__ const uint8_t* weights_message(uint32_t number) const {
        return nodes.weights + (number - 1) * nodes.weights_stride;
    }
    // The message with the sums from the node at `distance`, at least 1.
    __device__ const uint8_t* returned_message(uint32_t distance) const {
        return nodes.returned + (distance - 1) * nodes.rows_stride;
    }
    // This node's place in a sum by ascending node, or OWN_NODE_FIRST.
    __device__ uint32_t own_place() const { return nodes.own_place; }
    // A node's place in a sum by its distance; also the inverse, its distance by its place.
    __device__ uint32_t place_of(uint32_t distance) const {
        if (nodes.own_place == OWN_NODE_FIRST) {
            return distance;
        }
        const uint32_t all = nodes.other_nodes + 1;
        const uint32_t place = nodes.own_place + all - distance;
        return place < all ? place : place - all;
    }
    // The header of the message that source `number` has sent for the operation.
    __device__ const MessageHeader& header(uint32_t number) const {
        return header_of(is_combine ? weights_message(number) : rows_message(number));
    }
    // The number of tokens of source `number`; bounded, as it comes from another rank.
    __device__ uint32_t tokens_of(const LlShape& shape, uint32_t number) const {
        return min(header(number).tokens, shape.max_tokens);
    }
    // Source `number` of a dispatch.
    __device__ Source source(const LlShape& shape, uint32_t number) const {
        const uint32_t tokens = tokens_of(shape, number);
        const uint8_t* rows = body_of(rows_message(number));
        const uint8_t* ids = rows + uint64_t{tokens} * shape.row_bytes;
        return {number, nodes.rank_of_source[number], tokens, reinterpret_cast<const int64_t*>(ids),
                rows};
    }
};

// ---- The messages of an operation over several nodes -------------------------------------------

// Failures of messages are reported like all others, with `fail` (protocol.cuh).
struct LlReports {
    __device__ static void report(const LlCommon& common, uint32_t fault, const Awaited& awaited, ReportedValue ours,
                                  ReportedValue theirs);
};

// The header of a message that this rank sends in the operation.
template <typename Op>
__device__ __forceinline__ MessageHeader header_of_operation(const Op& op, uint32_t tokens) {
    const LlCommon& common = op.common;
    return {op.nodes.nodes.handle, tokens, common.fingerprint, common.channel, common.scales_word, op.epoch, 0, 0};
}

// The header that this thread checks first, loaded before it is needed.
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
        return Op::Net::template arrived<LlReports>(op.common, header, header_of_operation(op, 0),
                                                    op.from(rank, WAIT_BEGIN), rank);
    });
}

// Counts this block as done with its sums for sources; the last block sends them. All threads call it.
template <typename Op>
__device__ inline void finish_relay(const Op& op) {
    const LlNodes& nodes = op.nodes.nodes;
    __syncthreads();
    const uint32_t last = op.common.receive_blocks - 1;
    const bool finished_last =
        threadIdx.x == 0 &&
        inc_acq_rel_gpu(&op.common.channel_state->blocks_relayed, last) == last;
    if (__syncthreads_or(finished_last) != 0 && !has_failed(op.common.wait)) {
#pragma unroll 1
        for (uint32_t i = 1 + threadIdx.x; i < nodes.sources; i += blockDim.x) {
            Op::Net::send(op.nodes.rows_message(i), header_of_operation(op, 0));
        }
    }
}

// Whether the sums of all rail peers have arrived. Only the epoch is compared, as everything else was when the
// operation began. All threads call it.
template <typename Op>
__device__ inline bool sums_arrived(const Op& op) {
    const LlNodes& nodes = op.nodes.nodes;
    return all_arrived(nodes.other_nodes, [&](uint32_t i) {
        const uint32_t rank = nodes.rail_peers[i];
        const MessageHeader ours = header_of_operation(op, 0);
        MessageHeader header = ours;
        header.epoch = header_of(op.nodes.returned_message(i + 1)).epoch;
        return Op::Net::template arrived<LlReports>(op.common, header, ours, op.from(rank, WAIT_ROW), rank);
    });
}

}  // namespace nccl_ep
