// The receiving half of a dispatch: arriving chunks to the rows of the output.
#pragma once

#include "dispatch_routers.cuh"

namespace nccl_ep::ll_dispatch_impl {

// Waits until the routers of this block have come so far.
__device__ __forceinline__ void wait_for_routers(uint64_t* barrier) {
    while (!mbarrier_test_wait(barrier, 0)) {
        shared_spin_hint();
    }
    sync_warp();
}

// What `source` says about this lane's entry of its token.
template <typename Op>
__device__ __forceinline__ EntryWord entry_of(const Block<Op>& block, uint32_t source, uint32_t token) {
    if (lane_idx() >= block.shape.top_k) {
        return EntryWord::elsewhere();
    }
    const Op& op = block.op;
    const Arrival arrival = wait_for_packet(
        op.common, op.here().entries(source, token) + lane_idx(), op.from(source, WAIT_ENTRY));
    const EntryWord entry = {arrival.data};
    const bool is_valid = arrival.ok && entry.expert() < block.shape.local_experts;
    return is_valid ? entry : EntryWord::elsewhere();
}

// One warp copies a chunk of (source, token) to the token's output rows here, if it has any.
template <typename Op>
__device__ void receive_chunk(const Block<Op>& block, uint32_t source, uint32_t token,
                              uint32_t chunk_idx) {
    const Op& op = block.op;
    const EntryWord entry = entry_of(block, source, token);
    const bool comes = ballot(entry.is_here()).any();
    const BankRow<Own> from = op.here().row(block.bank_slots.of_token(source, token));
    const auto chunk = block.rows.chunk(block.shape, chunk_idx);
    typename Op::Rows::Data data;
    if (comes) {
        if (lane_idx() == 0 && block.shared.most_tokens > kPollWholeTokens) {
            wait_for_end(op, from, chunk, source);
        }
        sync_warp();
        data.load_arriving(from.data, chunk);
        take(op, from, chunk, source, data);
    }
    wait_for_routers(&block.shared.begins_known);
    const int32_t out_row =
        entry.is_here() ? block.output.row(block.per_expert, source, entry.expert(), entry.index()) : kNowhere;
    if (chunk_idx == 0 && lane_idx() < block.shape.top_k) {
        op.rows_of(source, token)[lane_idx()] = out_row;
    }
    if (block.params.out == nullptr) {
        return;
    }
    const auto target = block.rows.target(block.params, block.output, entry, out_row);
    for (LaneMask left = ballot(out_row >= 0); left.any(); left.drop_first()) {
        const auto to = target.of(left.first());
        block.rows.store(block.params, block.shape, to, chunk, data);
    }
}

template <typename Op>
__device__ void receive_rows(const Block<Op>& block) {
    wait_for_routers(&block.shared.tokens_known);
    const uint32_t units = arriving_units(block);
    for (uint32_t unit = block.receivers.next_unit(&block.shared.next_receive); unit < units;
         unit = block.receivers.next_unit(&block.shared.next_receive)) {
        const UnitOfAll arriving(block.op, unit);
        if (arriving.token < block.tokens_of[arriving.rank]) {
            receive_chunk(block, arriving.rank, arriving.token, arriving.chunk_idx);
        }
    }
}

}  // namespace nccl_ep::ll_dispatch_impl
