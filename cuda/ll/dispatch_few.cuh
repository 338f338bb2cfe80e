// The course of a low-latency dispatch of few tokens by few ranks of one node, whatever its layout: it tells and sends
// what dispatch_run.cuh does, with fewer instructions in the path of each block.
//
// Grid: blocks of five kinds, so that none waits for another's work: those that send rows; those that notify the peers;
// one that hears all ranks' notifications; where others may have more tokens than this rank, those that hear them as
// well and serve these tokens; those that copy arriving rows, and poll for just the notifications that they need.
//
// Ranks with these kernels and ranks with those for more tokens work together.
#pragma once

#include "dispatch_receive.cuh"
#include "dispatch_send.cuh"

namespace nccl_ep::ll_dispatch_impl {

// The lane that asks how many tokens a source has; those before it ask for the entries of a token.
constexpr uint32_t kTokensLane = kWarpSize - 1;
static_assert(LL_FEW_TOP_K == kTokensLane, "a lane for each entry");

template <typename Op>
__device__ __forceinline__ bool begin(const Block<Op>& block, Op& op, const Start& start) {
    if (threadIdx.x == 0) {
        block.shared.start = start;
    }
    __syncthreads();
    return all_lanes(op.begin(block.shared.start));
}

// As `receive`. Where the source has no such token, no entry is here.
template <typename Op, typename Chunk, typename HasBeside>
__device__ __forceinline__ bool receive_with_tokens(const Block<Op>& block, const UnitOfAll& unit,
                                                    const BankRow<Own>& from, const Chunk& chunk,
                                                    Received<Op>& received, Late& late, HasBeside has_beside) {
    const Op& op = block.op;
    const bool asks_tokens = lane_idx() == kTokensLane;
    const bool has_entry = lane_idx() < block.shape.top_k;
    const uint64_t* at = asks_tokens ? op.here().counts(unit.rank) + block.shape.local_experts
                                     : op.here().entries(unit.rank, unit.token) + lane_idx();
    return wait_as_warp_in(op.common.wait, late, [&] {
        // All loads are in flight together.
        const uint64_t packet = has_entry || asks_tokens ? ld_relaxed_sys(at) : op.packet(EntryWord::kElsewhere);
        const bool has_all_beside = has_beside();
        const bool has_come = received.row.poll(op, from, chunk, false) && has_all_beside;
        const bool is_there = packet_epoch(packet) == op.epoch;
        const bool is_known = all_lanes(is_there);
        late.awaited = op.from(unit.rank, is_known ? WAIT_ROW : WAIT_ENTRY);
        received.is_beyond = any_lane(asks_tokens && is_there && packet_data(packet) <= unit.token);
        received.entry = {packet_data(packet)};
        // It becomes an address, so it is checked.
        if (asks_tokens || received.entry.expert() >= block.shape.local_experts) {
            received.entry = EntryWord::elsewhere();
        }
        return received.is_beyond || (is_known && (has_come || !any_lane(received.entry.is_here())));
    });
}

// Most likely all ranks have as many tokens as this one, so blocks wait for these tokens' chunks right away. Blocks
// that have heard how many there are serve ranks with more.
template <typename Op, typename Take>
__device__ __forceinline__ void receive_all(const Block<Op>& block, const Share& share, bool has_heard, Take take) {
    const uint32_t of_token = block.op.ranks() * block.shape.chunks;
    const uint32_t likely = block.shape.tokens * of_token;
    const uint32_t first = has_heard ? likely : 0;
    const uint32_t last = has_heard ? block.shared.most_tokens * of_token : likely;
    const uint32_t step = num_warps() * share.blocks;
#pragma unroll 1
    for (uint32_t unit = first + share.unit(block.warp); unit < last; unit += step) {
        const UnitOfAll arriving(block.op, units_of_row<1>(block.shape), unit);
        Late late;
        const bool is_none = has_heard && arriving.token >= block.tokens_of[arriving.rank];
        if (!is_none && !take(arriving, late)) {
            report_late(block.op, late);
            return;
        }
    }
}

// `notify` begins and tells the peers of a part of the tokens; `hear` hears what all tell; `take` takes a chunk of a
// token of any rank, or says what is late.
template <typename Op, typename Notify, typename Hear, typename Take>
__device__ __forceinline__ void run_few(const LlDispatchParams& params, const typename Op::Rows& rows, Notify notify,
                                        Hear hear, Take take) {
    follow_grid();
    __shared__ SharedStorage shared;
    __shared__ uint32_t tokens_of[MAX_PEERS];
    DYNAMIC_SHARED(uint32_t, per_expert);
    Op op(params.common, WholeOnOneNode{{params.common.peers}});
    const Block<Op> block = {params, op, rows, shared, tokens_of, per_expert};
    const Share notifiers = tellers_of(params.common);
    Start start;
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
        notify(block, BlockOf{notifiers.index(), notifiers.blocks}, [&] { return begin(block, op, start); });
        advance_epoch(op);
        return;
    }
    const bool goes_on = begin(block, op, start);
    advance_epoch(op);
    if (!goes_on) {
        return;
    }
    const Share serving = {block.receivers.first + 1, params.serve_blocks};
    const Share others = {serving.first + serving.blocks, block.receivers.blocks - 1 - serving.blocks};
    const bool hears = !others.has_this_block();
    if (hears) {
        hear(block);
    }
    if (block.receivers.index() != 0) {
        receive_all(block, hears ? serving : others, hears,
                    [&](const UnitOfAll& unit, Late& late) { return take(block, unit, late); });
    }
}

}  // namespace nccl_ep::ll_dispatch_impl
