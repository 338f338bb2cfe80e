// The steps of a combine, common to all layouts.
#pragma once

#include "combine_sums.cuh"

namespace nccl_ep::ll_combine_impl {

// Sends the fingerprint of this rank, and of its other sources, to all peers, so that an operation never ends on a rank
// before all peers have begun it.
template <typename Op>
__device__ void send_fingerprint(const Block<Op>& block) {
    const Op& op = block.op;
#pragma unroll 1
    for (uint32_t peer = lane_idx(); peer < op.peers(); peer += kWarpSize) {
        if (!is_active(op.common.peers, peer)) {
            continue;
        }
        put_value(op.at(peer).fingerprint(op.rank()), op.packet(op.common.fingerprint));
        if constexpr (Op::kSeveral) {
            const LlNodes& nodes = op.nodes.nodes;
#pragma unroll 1
            for (uint32_t number = 1; number < nodes.sources; ++number) {
                put_value(op.at(peer).fingerprint(nodes.rank_of_source[number]),
                          op.packet(op.common.fingerprint));
            }
        }
    }
}

// Measures how long the other ranks take to begin, if the caller wants that; in a send phase only if that waits for
// their weights anyway.
template <typename Op>
__device__ __forceinline__ void time_fingerprints(const Block<Op>& block) {
    const Op& op = block.op;
    const bool waits = op.receives() || !(Op::kExact || Op::Layout::kCallerSums);
    if (waits && block.params.waits != nullptr) {
        time_ranks(op.common, op.nodes, op.epoch, op.here().fingerprint(0), block.params.waits);
    }
}

// Sends all rows: `send(block, unit)` sends one unit.
template <typename Op, typename Send>
__device__ void send_rows(const Block<Op>& block, Send send) {
    uint32_t most_tokens = 0;
#pragma unroll 1
    for (uint32_t rank = 0; rank < block.op.ranks(); ++rank) {
        most_tokens = max(most_tokens, block.tokens_of[rank]);
    }
    const uint32_t units = most_tokens * block.op.ranks() * block.units.count;
    const uint32_t step = sending_warps(block) * block.senders.blocks;
    // If each block has one token, its first warp sends the token's weights, so that warp comes last.
    const uint32_t place = block.warp == 0 ? num_warps() : block.warp;
    const uint32_t turn = place - (has_fingerprint_warp(block) && place > fingerprint_warp() ? 2 : 1);
#pragma unroll 1
    for (uint32_t unit = block.senders.unit(turn); unit < units;
         unit = Op::kFromQueue ? block.senders.next_unit(&block.shared.next_send) : unit + step) {
        const WorkUnit outgoing(block.op, block.units, unit);
        if (outgoing.token < block.tokens_of[outgoing.rank]) {
            send(block, outgoing);
        }
    }
}

// What the fingerprint warp does while others send and receive rows. It does not rejoin their control flow up to the
// end of the kernel, as that would make the code of each of their votes twice as long (LateWait).
template <typename Op>
__device__ __forceinline__ void run_fingerprint_warp(const Block<Op>& block) {
    const Op& op = block.op;
    time_fingerprints(block);
    advance_epoch(op);
    if (op.relays() || op.receives()) {
        check_fingerprints(block);
    }
    if constexpr (Op::kSeveral) {
        if (op.relays()) {
            finish_relay(op);
        }
    }
    acknowledge(op);
}

template <typename Op>
__device__ __forceinline__ void fill_shared(const Block<Op>& block, const StartState& start) {
    const LlCommon& common = block.params.common;
#pragma unroll 1
    for (uint32_t rank = threadIdx.x; rank < block.op.ranks(); rank += blockDim.x) {
        block.tokens_of[rank] = min(common.handle.tokens_of[rank], common.shape.max_tokens);
    }
    if (threadIdx.x == 0) {
        block.shared.start = start;
        if constexpr (Op::kFromQueue) {
            block.shared.next_send = sending_warps(block);
            block.shared.next_receive = 0;
        }
    }
}

// `notify` sends the ranks of the experts what they need besides fingerprints, such as weights; `send` sends a unit.
template <typename Type, typename Op, typename Nodes, typename Notify, typename Send>
__device__ __forceinline__ void run(const LlCombineParams& params, const Nodes& nodes, Notify notify, Send send) {
    __shared__ SharedStorage shared;
    __shared__ uint32_t tokens_of[Op::kSeveral ? LL_MAX_RANKS : MAX_PEERS];
    Op op(params.common, nodes);
    const Block<Op> block = {params, op, shared, tokens_of};
    StartState start;
    if (threadIdx.x == 0) {
        start.load(params.common);
    }
    MessageHeader header = {};
    if constexpr (Op::kSeveral) {
        header = first_header(op);
    }
    fill_shared(block, start);
    __syncthreads();
    bool goes_on = all_lanes(op.begin(shared.start)) && (!op.sends() || wait_until_bank_is_free(op, block.warp));
    if constexpr (Op::kSeveral) {
        goes_on = goes_on && (!op.sends() || sources_arrived(op, header)) &&
                  (!op.receives() || sums_arrived(op));
    }
    if (goes_on && op.sends() && block.receivers.has_this_block()) {
        if (is_fingerprint_warp(block)) {
            send_fingerprint(block);
        }
        notify(block);
    }
    if (goes_on && is_fingerprint_warp(block)) {
        run_fingerprint_warp(block);
        return;
    }
    if (goes_on && op.sends() && block.senders.has_this_block()) {
        send_rows(block, send);
    }
    advance_epoch(op);
    if (!goes_on) {
        return;
    }
    if constexpr (Op::kSeveral) {
#pragma unroll 1
        for (uint32_t turn = 0; turn < 2; ++turn) {
            const bool relays = turn == 0;
            if ((relays ? op.relays() : op.receives()) && block.receivers.has_this_block()) {
                receive_rows<Type>(block, relays);
                if (relays) {
                    finish_relay(op);
                }
            }
        }
    } else if (op.receives() && block.receivers.has_this_block()) {
        receive_rows<Type>(block, false);
    }
    acknowledge(op);
}

}  // namespace nccl_ep::ll_combine_impl
