// The receiving half of a dispatch: copies arriving chunks to the rows of the output.
#pragma once

#include "dispatch_notices.cuh"

namespace nccl_ep::ll_dispatch_impl {

// What has come for a chunk of a token: the chunk, if the token has an entry here, and in each lane one of its entries.
template <typename Op>
struct Received {
    Arriving<typename Op::Rows::Data> row;
    EntryWord entry;
    // Whether the source has no such token; set where that was not known before.
    bool is_beyond = false;
};

// Waits for a token's entries, for its chunk if it comes here, and for `has_topk`, which says whether the weights
// beside the row have come; false if it gives up.
template <typename Op, typename Chunk, typename HasTopk>
__device__ __forceinline__ bool receive(const Block<Op>& block, const WorkUnit& unit, const BankRow<Own>& from,
                                        const Chunk& chunk, Received<Op>& received, LateWait& late, HasTopk has_topk) {
    const Op& op = block.op;
    const uint64_t* at = op.here().entries(unit.rank, unit.token) + lane_idx();
    const bool has_entry = lane_idx() < block.shape.top_k;
    const bool gently = block.shared.most_tokens > kPollWholeTokens;
    return wait_as_warp_in(op.common.wait, late, [&] {
        // All loads are in flight together.
        const uint64_t packet = has_entry ? ld_relaxed_sys(at) : op.packet(EntryWord::kElsewhere);
        const bool has_topk_come = has_topk();
        const bool has_come = received.row.poll(op, from, chunk, gently) && has_topk_come;
        const bool is_known = all_lanes(packet_epoch(packet) == op.epoch);
        late.awaited = op.from(unit.rank, is_known ? WAIT_ROW : WAIT_ENTRY);
        received.entry = {packet_data(packet)};
        // Checked, as it becomes an address.
        if (received.entry.expert() >= block.shape.local_experts) {
            received.entry = EntryWord::elsewhere();
        }
        return is_known && (has_come || !any_lane(received.entry.is_here()));
    });
}

// One warp copies a chunk of a token to the token's output rows here, if there are any; false if it gives up.
template <typename Op>
__device__ __forceinline__ bool receive_chunk(const Block<Op>& block, const WorkUnit& unit, LateWait& late) {
    const Op& op = block.op;
    const uint32_t source = unit.rank;
    const BankRow<Own> from = op.here().row(block.bank_slots.of_token(source, unit.token));
    const auto chunk = block.rows.chunk(block.shape, unit.number);
    Received<Op> received;
    if (!receive(block, unit, from, chunk, received, late, [] { return true; })) {
        return false;
    }
    const EntryWord entry = received.entry;
    if (any_lane(entry.is_here())) {
        reset_chunk<typename Op::Rows::Data>(from, chunk);
    }
    const int32_t out_row =
        entry.is_here() ? block.output.row(block.per_expert, source, entry.expert(), entry.index()) : kNowhere;
    if (unit.number == 0 && lane_idx() < block.shape.top_k) {
        op.rows_of(source, unit.token)[lane_idx()] = out_row;
    }
    if (block.params.out == nullptr) {
        return true;
    }
    const auto target = block.rows.target(block.params, block.output, entry, out_row);
#pragma unroll 1
    for (LaneMask left = ballot(out_row >= 0); left.any(); left.drop_first()) {
        const auto to = target.of(left.first());
        block.rows.store(block.params, block.shape, to, chunk, received.row.data);
    }
    return true;
}

// Receives all rows: `take(unit, late)` receives one unit, or returns false and says what is late.
template <typename Op, typename Take>
__device__ void receive_rows(const Block<Op>& block, Take take) {
    const uint32_t units = arriving_units(block);
    const BlockRange& receivers = block.receivers;
    const uint32_t step = num_warps() * receivers.blocks;
    // The first blocks, and the first warp of each, are busy notifying the peers, so they come last.
    const uint32_t turn = (block.warp == 0 ? num_warps() : block.warp) - 1;
#pragma unroll 1
    for (uint32_t unit = (turn + 1) * receivers.blocks - 1 - receivers.index(); unit < units; unit += step) {
        const WorkUnit arriving(block.op, units_of_row<1>(block.shape), unit);
        LateWait late;
        if (arriving.token < block.tokens_of[arriving.rank] && !take(arriving, late)) {
            report_late(block.op, late);
            return;
        }
    }
}

}  // namespace nccl_ep::ll_dispatch_impl
