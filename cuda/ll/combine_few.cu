// Low-latency combine of few tokens among few ranks of one node: sums as combine.cu, with fewer instructions in the
// path of each block (as dispatch_few.cuh).
//
// Grid: blocks of three kinds: blocks that send rows; blocks that send weights, of which the first also sends this
// rank's fingerprint and checks those of the others; blocks that receive.

#include "../base/entry.cuh"
#include "combine_run.cuh"
#include "combine_send.cuh"

namespace nccl_ep::ll_combine_few_impl {

using namespace ll_combine_impl;

// As FewTokens with more data in flight: blocks have fewer threads, so there are registers for it.
struct FewerTokens {
    static constexpr uint32_t kChunks = 1;
    static constexpr uint32_t kRows = 4;
    static constexpr uint32_t kSendRows = 4;
    static constexpr bool kFromQueue = false;
};
using Op = CombineOperation<WholeOnOneNode, FewerTokens>;

__device__ __forceinline__ void notify(const Block<Op>& block, const BlockRange& notifiers) {
    const bool is_first = notifiers.index() == 0 && block.warp == num_warps() - 1;
    if (is_first) {
        send_fingerprint(block);
    }
    send_weights(block, notifiers);
    if (is_first) {
        time_fingerprints(block);
        check_fingerprints(block);
    }
}

template <typename Type>
__device__ __forceinline__ void receive_few(const Block<Op>& block) {
    const uint32_t units = block.shape.tokens * block.units.count;
    const uint32_t step = num_warps() * block.receivers.blocks;
#pragma unroll 1
    for (uint32_t unit = block.receivers.unit(block.warp); unit < units; unit += step) {
        const DivMod at = divide(unit, block.units.count, block.units.reciprocal);
        LateWait late;
        if (!receive_unit<Type>(block, {0, at.quotient}, at.remainder, late)) {
            report_late(block.op, late);
            return;
        }
    }
}

template <typename Type>
__device__ __forceinline__ void run(const LlCombineParams& params) {
    follow_grid();
    __shared__ SharedStorage shared;
    __shared__ uint32_t tokens_of[MAX_PEERS];
    Op op(params.common, WholeOnOneNode{{params.common.peers}});
    const Block<Op> block = {params, op, shared, tokens_of};
    StartState start;
    if (threadIdx.x == 0) {
        start.load(params.common);
    }
    fill_shared(block, start);
    __syncthreads();
    const bool goes_on = all_lanes(op.begin(shared.start));
    if (!goes_on) {
        advance_epoch(op);
        return;
    }
    if (block.senders.has_this_block()) {
        send_rows(block, [](const Block<Op>& block, const WorkUnit& outgoing) {
            send_unit<Type>(block, outgoing, row_of_lane(block, outgoing.rank, outgoing.token));
        });
        advance_epoch(op);
    } else if (block.receivers.has_this_block()) {
        advance_epoch(op);
        receive_few<Type>(block);
    } else {
        notify(block, notifiers_of(params.common));
        advance_epoch(op);
    }
}

ENTRY_BY_TYPE(ll_combine_few, run<T>(params))

}  // namespace nccl_ep::ll_combine_few_impl
