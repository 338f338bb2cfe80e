// The steps of a dispatch, common to all layouts.
#pragma once

#include "dispatch_receive.cuh"
#include "dispatch_send.cuh"

namespace nccl_ep::ll_dispatch_impl {

// `notify` notifies peers of a share of a source's tokens; `receive` receives the peers' notifications and rows.
template <typename Op, typename Nodes, typename Notify, typename Receive>
__device__ __forceinline__ void run(const LlDispatchParams& params, const Nodes& nodes, const typename Op::Rows& rows,
                                    Notify notify, Receive receive) {
    __shared__ SharedStorage shared;
    __shared__ uint32_t tokens_of[Op::kSeveral ? LL_MAX_RANKS : MAX_PEERS];
    DYNAMIC_SHARED(uint32_t, per_expert);
    Op op(params.common, nodes);
    const Block<Op> block = {params, op, rows, shared, tokens_of, per_expert};
    StartState start;
    if (threadIdx.x == 0) {
        start.load(params.common);
        shared.most_tokens = 0;
    }
    MessageHeader header = {};
    if constexpr (Op::kSeveral) {
        header = first_header(op);
    }
    clear_histograms(block);
    const bool goes_on = send_all(block, [&] {
        if (threadIdx.x == 0) {
            shared.start = start;
        }
        __syncthreads();
        bool ok = all_lanes(op.begin(shared.start)) && (!op.sends() || wait_until_bank_is_free(op, block.warp));
        if constexpr (Op::kSeveral) {
            ok = ok && (!op.relays() || sources_arrived(op, header));
        }
        if (ok && block.notifies()) {
            notify_all(block, notify);
        }
        return ok;
    });
    advance_epoch(op);
    if (!goes_on) {
        return;
    }
    if (op.receives() && block.receivers.has_this_block()) {
        receive(block);
    }
    acknowledge(op);
}

}  // namespace nccl_ep::ll_dispatch_impl
