// The steps of a combine, common to all kinds of input rows.
#pragma once

#include "combine_receive.cuh"
#include "combine_send.cuh"

namespace nccl_ep::ht_combine_impl {

// A warp adds to `waits` how long each peer's first row takes to arrive, which stays visible after another warp has
// taken the row. `ranks` has the group ranks of the peers, NULL on one node.
__device__ __noinline__ static void time_first_rows(const HtCommon& common, const HtPairs& pairs, uint64_t* waits,
                                                    const uint32_t* ranks) {
    const uint64_t begin = globaltimer_ns();
    wait_for_ranks(
        common.peers.ranks, [&](uint32_t peer) { return pairs.to_receive[peer] != 0; },
        [&](uint32_t peer) {
            const uint32_t first = pairs.received_end[peer] - pairs.to_receive[peer] * common.shape.row_units;
            const uint64_t arrived = ld_relaxed_sys(own_rings(common).arrival(peer, first));
            const bool has_come = is_or_follows(packet_epoch(arrived), first + 1);
            if (has_come) {
                add_wait(waits, ranks == nullptr ? peer : ranks[peer], begin);
            }
            return has_come;
        },
        [&](uint32_t peer, uint64_t start) {
            return keep_waiting(common, {WAIT_STREAMED_ROW, peer, pairs.operation}, start, 0);
        });
}

template <typename Type, typename Scope, typename Partials, typename InputRows>
__device__ void run(const HtCombineParams& params, const Scope& scope, const Partials& partials,
                    const InputRows& input) {
    __shared__ SharedStorage shared;
    DYNAMIC_SHARED(uint8_t, buffers);
    const HtCommon& common = params.common;
    const Block<Scope, Partials, InputRows> block = {params, scope, partials, input, shared};
    for (uint32_t peer = threadIdx.x; peer < MAX_PEERS; peer += blockDim.x) {
        shared.scheduler.next[peer] = 0;
    }
    if (threadIdx.x == 0) {
        shared.next_token = 0;
    }
    clear_queues(shared.notify_state);
    if (!begin_operation(common, scope, true, shared.pairs) ||
        !scope.messages_arrived(common, shared.pairs)) {
        return;
    }
    uint32_t needed = shared.pairs.total;
    if constexpr (InputRows::kZones) {
        needed = input.needed();
    }
    if (params.in_rows < needed) {
        // Without these rows there is nothing to return to the peers, so nothing is sent at all.
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            fail(common, params.rows_fault, block.rank(), needed, params.in_rows);
        }
        return;
    }
    // The last block receives; this warp's share is done by the block's other warps meanwhile.
    if (params.waits != nullptr && blockIdx.x == gridDim.x - 1 && warp_idx() == num_warps() - 1) {
        time_first_rows(common, shared.pairs, params.waits, scope.ranks());
    }
    if (!InputRows::kZones && block.receives()) {
        sum_tokens<Type>(block, nullptr);
    } else if (warp_idx() < common.shape.copy_warps) {
        typename InputRows::Buffers staging(buffers + warp_idx() * common.shape.warp_bytes, common.shape.chunk_bytes,
                                            &shared.barriers[warp_idx()]);
        if (InputRows::kZones && !block.senders.has_this_block()) {
            sum_tokens<Type>(block, &staging);
            return;
        }
        NotifyQueue queue(shared.notify_state, queue_of_warp(common, buffers, warp_idx()), staging);
        send_rows(block, staging, queue);
    } else if (warp_idx() == common.shape.copy_warps && (!InputRows::kZones || block.senders.has_this_block())) {
        notify_peers(common, WholeSlots{}, shared.pairs, shared.notify_state, buffers, [&] {
            if (!block.senders_fill_rings()) {
                poll_credits<Staging>(common, shared.pairs);
            }
        });
    }
}

}  // namespace nccl_ep::ht_combine_impl
