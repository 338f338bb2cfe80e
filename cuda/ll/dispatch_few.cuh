// The steps of a low-latency dispatch of few tokens among few ranks of one node, common to all layouts. It sends the
// same as dispatch_run.cuh, with fewer instructions in the path of each block, so a rank that runs these kernels works
// with ranks that run those for more tokens.
//
// Grid: blocks of five kinds, so that none waits for the work of another: blocks that send rows; blocks that notify the
// peers; one block that receives all ranks' counts; if other ranks may have more tokens than this one, blocks that
// receive the counts as well and then these ranks' surplus tokens; and blocks that copy all other arriving rows and
// poll only for the notifications that these need.
#pragma once

#include "dispatch_receive.cuh"
#include "dispatch_send.cuh"

namespace nccl_ep::ll_dispatch_impl {

// The lane that polls for a source's number of tokens; the lanes before it poll for the entries of a token.
constexpr uint32_t kTokensLane = kWarpSize - 1;
static_assert(LL_FEW_TOP_K == kTokensLane, "a lane for each entry");

template <typename Op>
__device__ __forceinline__ bool begin(const Block<Op>& block, Op& op, const StartState& start) {
    if (threadIdx.x == 0) {
        block.shared.start = start;
    }
    __syncthreads();
    return all_lanes(op.begin(block.shared.start));
}

// As `receive`, before it is known how many tokens the source has.
template <typename Op, typename Chunk, typename HasTopk>
__device__ __forceinline__ bool receive_with_tokens(const Block<Op>& block, const WorkUnit& unit,
                                                    const BankRow<Own>& from, const Chunk& chunk,
                                                    Received<Op>& received, LateWait& late, HasTopk has_topk) {
    const Op& op = block.op;
    const bool polls_tokens = lane_idx() == kTokensLane;
    const bool has_entry = lane_idx() < block.shape.top_k;
    const uint64_t* at = polls_tokens ? op.here().counts(unit.rank) + block.shape.local_experts
                                      : op.here().entries(unit.rank, unit.token) + lane_idx();
    return wait_as_warp_in(op.common.wait, late, [&] {
        // All loads are in flight together.
        const uint64_t packet = has_entry || polls_tokens ? ld_relaxed_sys(at) : op.packet(EntryWord::kElsewhere);
        const bool has_topk_come = has_topk();
        const bool has_come = received.row.poll(op, from, chunk, false) && has_topk_come;
        const bool is_there = packet_epoch(packet) == op.epoch;
        const bool is_known = all_lanes(is_there);
        late.awaited = op.from(unit.rank, is_known ? WAIT_ROW : WAIT_ENTRY);
        received.is_beyond = any_lane(polls_tokens && is_there && packet_data(packet) <= unit.token);
        received.entry = {packet_data(packet)};
        // Checked, as it becomes an address.
        if (polls_tokens || received.entry.expert() >= block.shape.local_experts) {
            received.entry = EntryWord::elsewhere();
        }
        return received.is_beyond || (is_known && (has_come || !any_lane(received.entry.is_here())));
    });
}

// Receives units. Most likely all ranks have as many tokens as this one, so blocks that do not know the counts wait for
// the chunks of that many tokens of each rank. Blocks with `knows_counts` receive the tokens beyond these.
template <typename Op, typename Take>
__device__ __forceinline__ void receive_all(const Block<Op>& block, const BlockRange& share, bool knows_counts,
                                            Take take) {
    const uint32_t of_token = block.op.ranks() * block.shape.chunks;
    const uint32_t likely = block.shape.tokens * of_token;
    const uint32_t first = knows_counts ? likely : 0;
    const uint32_t last = knows_counts ? block.shared.most_tokens * of_token : likely;
    const uint32_t step = num_warps() * share.blocks;
#pragma unroll 1
    for (uint32_t unit = first + share.unit(block.warp); unit < last; unit += step) {
        const WorkUnit arriving(block.op, units_of_row<1>(block.shape), unit);
        LateWait late;
        const bool is_none = knows_counts && arriving.token >= block.tokens_of[arriving.rank];
        if (!is_none && !take(arriving, late)) {
            report_late(block.op, late);
            return;
        }
    }
}

// `notify` calls its last argument to begin, then notifies the peers of a share of the tokens; `receive_counts` waits
// for the counts of all ranks; `take` receives a unit, or says what is late.
template <typename Op, typename Notify, typename ReceiveCounts, typename Take>
__device__ __forceinline__ void run_few(const LlDispatchParams& params, const typename Op::Rows& rows, Notify notify,
                                        ReceiveCounts receive_counts, Take take) {
    follow_grid();
    __shared__ SharedStorage shared;
    __shared__ uint32_t tokens_of[MAX_PEERS];
    DYNAMIC_SHARED(uint32_t, per_expert);
    Op op(params.common, WholeOnOneNode{{params.common.peers}});
    const Block<Op> block = {params, op, rows, shared, tokens_of, per_expert};
    const BlockRange notifiers = notifiers_of(params.common);
    StartState start;
    if (threadIdx.x == 0) {
        start.load(params.common);
        shared.most_tokens = 0;
    }
    if (block.senders.has_this_block()) {
        send_all(block, [&] { return begin(block, op, start); });
        advance_epoch(op);
        return;
    }
    if (notifiers.has_this_block()) {
        clear_histograms(block);
        notify(block, SourceShare{notifiers.index(), notifiers.blocks}, [&] { return begin(block, op, start); });
        advance_epoch(op);
        return;
    }
    const bool goes_on = begin(block, op, start);
    advance_epoch(op);
    if (!goes_on) {
        return;
    }
    const BlockRange serving = {block.receivers.first + 1, params.serve_blocks};
    const BlockRange others = {serving.first + serving.blocks, block.receivers.blocks - 1 - serving.blocks};
    const bool knows_counts = !others.has_this_block();
    if (knows_counts) {
        receive_counts(block);
    }
    if (block.receivers.index() != 0) {
        receive_all(block, knows_counts ? serving : others, knows_counts,
                    [&](const WorkUnit& unit, LateWait& late) { return take(block, unit, late); });
    }
}

}  // namespace nccl_ep::ll_dispatch_impl
