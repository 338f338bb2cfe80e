// The steps of a dispatch, common to all kinds of rows.
#pragma once

#include "dispatch_receive.cuh"
#include "dispatch_send.cuh"

namespace nccl_ep::ht_dispatch_impl {

// How many rows the outputs must have.
template <typename Block>
__device__ __forceinline__ uint32_t rows_needed(const Block& block) {
    if constexpr (Block::kZones) {
        return block.rows.needed();
    } else {
        return block.shared.pairs.total;
    }
}

// Whether the outputs have room for what comes; an output that is not wanted has room for any number of rows. Otherwise
// the operation fails: here at once, on peers while they wait for this rank or when they begin their next operation.
template <typename Block>
__device__ bool check_outputs(const Block& block) {
    const HtDispatchParams& params = block.params;
    const uint32_t total = rows_needed(block);
    const bool rows_fit = params.out_rows >= total;
    const bool scales_fit = block.rows.scale_rows() >= total;
    const bool routing_fits = params.routing_rows >= total;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        if (!rows_fit) {
            fail(params.common, FAULT_TOKEN_ROWS, block.rank(), total, params.out_rows);
        } else if (!scales_fit) {
            fail(params.common, FAULT_SCALE_ROWS, block.rank(), total, block.rows.scale_rows());
        } else if (!routing_fits) {
            const uint32_t fault = Block::kZones ? FAULT_WEIGHT_ROWS : FAULT_ROUTING_ROWS;
            fail(params.common, fault, block.rank(), total, params.routing_rows);
        }
    }
    return rows_fit && scales_fit && routing_fits;
}

__device__ __forceinline__ void clear_shared(SharedStorage& shared, const BlockRange& receivers, uint8_t* zeros) {
    for (uint32_t peer = threadIdx.x; peer < MAX_PEERS; peer += blockDim.x) {
        shared.arrived[peer] = row_of_turn(receivers, peer, 0);
    }
    if (threadIdx.x == 0) {
        shared.next_token = 0;
        shared.next_own = 0;
        shared.next_unused = 0;
    }
    for (uint32_t i = threadIdx.x; i < HT_ZERO_BYTES / sizeof(Vec16); i += blockDim.x) {
        reinterpret_cast<Vec16*>(zeros)[i] = {{0, 0, 0, 0}};
    }
    fence_for_bulk();
    clear_queues(shared.notify_state);
}

template <typename Scope, typename Rows>
__device__ void run(const HtDispatchParams& params, const Scope& scope, const Rows& rows) {
    __shared__ SharedStorage shared;
    DYNAMIC_SHARED(uint8_t, memory);
    uint8_t* zeros = memory;
    uint8_t* buffers = memory + HT_ZERO_BYTES;
    const HtCommon& common = params.common;
    const Block<Scope, Rows> block = {params, scope, rows, shared, zeros};
    clear_shared(shared, block.receivers, zeros);
    const bool begins = begin_operation(common, scope, false, shared.pairs) &&
                        scope.messages_arrived(common, shared.pairs) && check_outputs(block);
    sync_warp();
    if (!all_lanes(begins)) {
        return;
    }
    if (params.counter != nullptr && blockIdx.x == gridDim.x - 1) {
        for (uint32_t i = threadIdx.x; i < common.layout.local_experts; i += blockDim.x) {
            params.counter[i] = common.handle.counts[i];
        }
    }
    const bool sends = block.senders.has_this_block();
    sync_warp();
    if (any_lane(warp_idx() >= common.shape.copy_warps)) {
        if (sends) {
            notify_peers(common, AnyUnits{common}, shared.pairs, shared.notify_state, buffers,
                         [&] { poll_credits<Staging>(common, shared.pairs); });
        } else {
            poll_arrivals(block);
        }
        return;
    }
    Staging staging(buffers + warp_idx() * common.shape.warp_bytes, rows.buffer_bytes(common),
                    &shared.barriers[warp_idx()]);
    if (sends) {
        NotifyQueue queue(shared.notify_state, queue_of_warp(common, buffers, warp_idx()), staging);
        send_rows(block, staging, queue);
    } else {
        receive_rows(block, staging);
    }
}

}  // namespace nccl_ep::ht_dispatch_impl
