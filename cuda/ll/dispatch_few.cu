// Low-latency dispatch of few tokens by few ranks of one node: as dispatch.cu tells and sends, with fewer instructions
// on the way of each block.
//
// Grid: blocks of four kinds, so that none waits for another's work: those that send rows; those that notify the peers;
// one that hears what all ranks have notified this one of; those that copy arriving rows. These find where a source's
// rows begin by themselves, from the counts of the sources before it, and need no table for all experts.
//
// A rank with this kernel and one with that of dispatch.cu understand each other.

#include "../base/entry.cuh"
#include "dispatch_receive.cuh"
#include "dispatch_send.cuh"

namespace nccl_ep::ll_dispatch_few_impl {

using namespace ll_dispatch_impl;

template <typename Rows>
using Op = DispatchOperation<WholeOnOneNode, Rows>;

// The lane that asks how many tokens a source has; those before it ask for the entries of a token.
constexpr uint32_t kTokensLane = kWarpSize - 1;
static_assert(LL_FEW_TOP_K == kTokensLane, "a lane for each entry");

// Blocks between those that send and those that receive.
__device__ __forceinline__ Share notifiers_of(const LlCommon& common) {
    return {common.send_blocks, gridDim.x - common.receive_blocks - common.send_blocks};
}

template <typename Op>
__device__ __forceinline__ bool begin(const Block<Op>& block, Op& op, const Start& start) {
    if (threadIdx.x == 0) {
        block.shared.start = start;
    }
    __syncthreads();
    return all_lanes(op.begin(block.shared.start));
}

// Waits for a chunk of (source, token), if it comes here; false if that is given up. Where the source has no such
// token, no entry is here.
template <typename Op, typename Chunk>
__device__ __forceinline__ bool receive_few(const Block<Op>& block, const UnitOfAll& unit, const BankRow<Own>& from,
                                            const Chunk& chunk, Received<Op>& received, bool& is_beyond, Late& late) {
    const Op& op = block.op;
    const bool asks_tokens = lane_idx() == kTokensLane;
    const bool has_entry = lane_idx() < block.shape.top_k;
    const uint64_t* at = asks_tokens ? op.here().counts(unit.rank) + block.shape.local_experts
                                     : op.here().entries(unit.rank, unit.token) + lane_idx();
    return wait_as_warp_in(op.common.wait, late, [&] {
        // All are under way together.
        const uint64_t packet = has_entry || asks_tokens ? ld_relaxed_sys(at) : op.packet(EntryWord::kElsewhere);
        const bool has_come = received.row.poll(op, from, chunk, false);
        const bool is_there = packet_epoch(packet) == op.epoch;
        const bool is_known = all_lanes(is_there);
        late.awaited = op.from(unit.rank, is_known ? WAIT_ROW : WAIT_ENTRY);
        is_beyond = any_lane(asks_tokens && is_there && packet_data(packet) <= unit.token);
        received.entry = {packet_data(packet)};
        // It becomes an address.
        if (asks_tokens || received.entry.expert() >= block.shape.local_experts) {
            received.entry = EntryWord::elsewhere();
        }
        return is_beyond || (is_known && (has_come || !any_lane(received.entry.is_here())));
    });
}

// Finds the output row of this lane's entry of a token of `source`, or kNowhere; false if that is given up.
template <typename Op>
__device__ __forceinline__ bool find_out_row(const Block<Op>& block, uint32_t source, const EntryWord& entry,
                                             int32_t& row, Late& late) {
    const Op& op = block.op;
    uint32_t slot = entry.index();
#pragma unroll 1
    for (uint32_t before = 0; before < source; ++before) {
        late.awaited = op.from(before, WAIT_COUNTS);
        const uint64_t* at = op.here().counts(before) + entry.expert();
        uint64_t count = op.packet(0);
        const bool ok = wait_as_warp_in(op.common.wait, late, [&] {
            if (entry.is_here()) {
                count = ld_relaxed_sys(at);
            }
            return all_lanes(packet_epoch(count) == op.epoch);
        });
        if (!ok) {
            return false;
        }
        slot += packet_data(count);
    }
    row = entry.is_here() ? block.output.row_at(entry.expert(), slot) : kNowhere;
    return true;
}

// One warp copies a chunk to the token's output rows here, if it has any. False if it is given up.
template <typename Op>
__device__ __forceinline__ bool receive_chunk_few(const Block<Op>& block, const UnitOfAll& unit, Late& late) {
    const Op& op = block.op;
    const BankRow<Own> from = op.here().row(block.bank_slots.of_token(unit.rank, unit.token));
    const auto chunk = block.rows.chunk(block.shape, unit.number);
    Received<Op> received;
    bool is_beyond = false;
    int32_t out_row;
    if (!receive_few(block, unit, from, chunk, received, is_beyond, late)) {
        return false;
    }
    if (is_beyond) {
        return true;
    }
    if (!find_out_row(block, unit.rank, received.entry, out_row, late)) {
        return false;
    }
    if (any_lane(received.entry.is_here())) {
        let_go<typename Op::Rows::Data>(from, chunk);
    }
    if (unit.number == 0 && lane_idx() < block.shape.top_k) {
        op.rows_of(unit.rank, unit.token)[lane_idx()] = out_row;
    }
    const auto target = block.rows.target(block.params, block.output, received.entry, out_row);
#pragma unroll 1
    for (LaneMask left = ballot(out_row >= 0); left.any(); left.drop_first()) {
        const auto to = target.of(left.first());
        block.rows.store(block.params, block.shape, to, chunk, received.row.data);
    }
    return true;
}

// Nobody knows yet how many tokens the others have.
template <typename Op>
__device__ __forceinline__ void receive_all(const Block<Op>& block, const Share& receivers) {
    const uint32_t units = block.shape.max_tokens * block.op.ranks() * block.shape.chunks;
    const uint32_t step = num_warps() * receivers.blocks;
#pragma unroll 1
    for (uint32_t unit = receivers.unit(block.warp); unit < units; unit += step) {
        Late late;
        if (!receive_chunk_few(block, UnitOfAll(block.op, units_of_row<1>(block.shape), unit), late)) {
            report_late(block.op, late);
            return;
        }
    }
}

template <typename Rows>
__device__ __forceinline__ void run(const LlDispatchParams& params, const Rows& rows) {
    follow_grid();
    __shared__ SharedStorage shared;
    __shared__ uint32_t tokens_of[MAX_PEERS];
    DYNAMIC_SHARED(uint32_t, per_expert);
    Op<Rows> op(params.common, WholeOnOneNode{{params.common.peers}});
    const Block<Op<Rows>> block = {params, op, rows, shared, tokens_of, per_expert};
    const Share notifiers = notifiers_of(params.common);
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
        const bool goes_on = begin(block, op, start);
        if (goes_on) {
            notify(block, block.source(0), {notifiers.index(), notifiers.blocks});
        }
        advance_epoch(op);
        return;
    }
    const bool goes_on = begin(block, op, start);
    advance_epoch(op);
    if (!goes_on) {
        return;
    }
    if (block.receivers.index() == 0) {
        find_begins(block);
    } else {
        receive_all(block, {block.receivers.first + 1, block.receivers.blocks - 1});
    }
}

ENTRY(ll_dispatch_few) { run(params, PlainRows{}); }
ENTRY(ll_dispatch_few_scaled) { run(params.dispatch, ForwardedRows<1>{{params.rows}}); }
ENTRY(ll_dispatch_few_cast_bf16) { run(params.dispatch, CastRows<Bf16, 1>{{params.rows}}); }
ENTRY(ll_dispatch_few_cast_f16) { run(params.dispatch, CastRows<F16, 1>{{params.rows}}); }
ENTRY(ll_dispatch_few_cast_f32) { run(params.dispatch, CastRows<F32, 1>{{params.rows}}); }

}  // namespace nccl_ep::ll_dispatch_few_impl
