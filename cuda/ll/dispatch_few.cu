// Expert-major low-latency dispatch of few tokens (dispatch_few.cuh). A receiving warp finds where a source's rows
// begin by adding the counts of the sources before it, without a table for all experts.

#include "../base/entry.cuh"
#include "dispatch_few.cuh"

namespace nccl_ep::ll_dispatch_few_impl {

using namespace ll_dispatch_impl;

// Finds the output row of this lane's entry of a token of `source`, or kNowhere; false if it gives up.
template <typename Op>
__device__ __forceinline__ bool find_out_row(const Block<Op>& block, uint32_t source, const EntryWord& entry,
                                             int32_t& row, LateWait& late) {
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

// One warp copies a chunk to the token's output rows here, if there are any; false if it gives up.
template <typename Op>
__device__ __forceinline__ bool receive_chunk_few(const Block<Op>& block, const WorkUnit& unit, LateWait& late) {
    const Op& op = block.op;
    const BankRow<Own> from = op.here().row(block.bank_slots.of_token(unit.rank, unit.token));
    const auto chunk = block.rows.chunk(block.shape, unit.number);
    Received<Op> received;
    int32_t out_row;
    if (!receive_with_tokens(block, unit, from, chunk, received, late, [] { return true; })) {
        return false;
    }
    if (received.is_beyond) {
        return true;
    }
    if (!find_out_row(block, unit.rank, received.entry, out_row, late)) {
        return false;
    }
    if (any_lane(received.entry.is_here())) {
        reset_chunk<typename Op::Rows::Data>(from, chunk);
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

template <typename Rows>
__device__ __forceinline__ void run(const LlDispatchParams& params, const Rows& rows) {
    using Op = DispatchOperation<WholeOnOneNode, Rows>;
    run_few<Op>(
        params, rows,
        [](const Block<Op>& block, const SourceShare& part, auto begin) {
            if (begin()) {
                notify(block, block.source(0), part);
            }
        },
        [](const Block<Op>& block) { find_begins(block); },
        [](const Block<Op>& block, const WorkUnit& unit, LateWait& late) {
            return receive_chunk_few(block, unit, late);
        });
}

ENTRY(ll_dispatch_few) { run(params, PlainRows{}); }
ENTRY(ll_dispatch_few_scaled) { run(params.dispatch, ForwardedRows<1>{{params.rows}}); }
ENTRY_BY_TYPE(ll_dispatch_few_cast, run(params.dispatch, CastRows<T, 1>{{params.rows}}))

}  // namespace nccl_ep::ll_dispatch_few_impl
