// Views: rows of a rank-major dispatch that stay where they arrive, in a bank of views that is the caller's tensor.
//
// A rank has LL_VIEW_BANKS banks of rows [ranks][max_tokens], in memory that its peers map besides its window. The rows
// of a source are contiguous. Their words hold kSentinel until data arrives, as in other banks (chunk.cuh); everything
// else that a dispatch sends goes to the bank of its epoch. The host chooses the view banks of dispatches in turn, so
// that a dispatch has the same address in each replay of a graph.
//
// Why a row is never written while somebody still reads it, or before its words hold kSentinel again
//
// A bank is *clean* if all words in which rows of peers arrive hold kSentinel. `LlViewState::owner` is 0 for a clean
// bank, else the epoch of the dispatch that has filled it. Owners and lengths of rows in effect change between kernels
// only: the last block of a kernel to begin writes them once all blocks have read them, and the next kernel in the
// group's order is the next to read them.
//
// - A dispatch owns its bank from then on. A combine cleans the bank if its owner is the handle's last rank-major
//   dispatch, whose epoch the handle keeps (0 if its rows were copied). Each warp writes kSentinel over a chunk of the
//   view after its own load of the same chunk of the caller's rows, which may be the view; if rows of the view have
//   another length, over its share of them. The experts have read the view by then, as it lives until the combine
//   begins. Own rows stay, as nobody polls them. The combine leaves the bank alone if it has another owner, or if its
//   rows lie there with another length.
// - A dispatch to a bank that is not clean cleans it first, with all its blocks. So does a dispatch whose rows or
//   scales have other lengths than the bank's last ones. It cleans everything that the old rows could reach: it will
//   poll where this rank's own rows were, or scales, neither of which is cleaned otherwise (view_rows.cuh). All ranks
//   know the same lengths, so then none relies on its peers' notifications.
// - A rank writes rows to a peer's bank only if it knows from that peer that the bank is clean. In each operation of
//   these kernels a rank tells each peer which of its banks are clean as the kernel begins, except the one that a
//   dispatch is about to fill: `clean_word`, in a packet that it sends anyway. If the operation just before this one
//   has said that the bank is clean, it still is: only an operation of that rank could change it, and that one was the
//   last. Else the sender waits for the peer's fingerprint of this operation, which a rank sends once its bank is
//   clean. That depends on no other rank, so the wait terminates. As banks alternate, this wait is rare: where pairs of
//   dispatch and combine follow each other, or two overlap, the operation before has said so.
// - A peer's rows come after the stores that clean a bank, as these come before everything that notifies of them:
//   stores of an earlier kernel because it has ended, stores of the same kernel by the atomic count of blocks that have
//   cleaned and the release of the fingerprint.
// - A reader of the previous operation's packet finds it, or one of a later operation, and then waits for the
//   fingerprint: packets of a bank are overwritten two operations later at the earliest.
//
// None of this depends on which ranks' combines cleaned: a rank whose combine did not clean says so itself.
#pragma once

#include "../layout/rank_major.cuh"
#include "chunk.cuh"
#include "params/ll_view.h"

namespace nccl_ep {

// The bits of `clean_word` begin here; below are the bits of the source's row count, which is in the same packet.
constexpr uint32_t kCleanShift = 8 * sizeof(uint32_t) - LL_VIEW_BANKS;

// Which banks are clean, by the owners as the kernel began. `filled` is the bank that it fills, or LL_VIEW_BANKS.
__device__ __forceinline__ uint32_t clean_word(const uint32_t (&owner)[LL_VIEW_BANKS], uint32_t filled) {
    uint32_t word = 0;
#pragma unroll
    for (uint32_t bank = 0; bank < LL_VIEW_BANKS; ++bank) {
        word |= owner[bank] == 0 && bank != filled ? 1u << (kCleanShift + bank) : 0;
    }
    return word;
}

// A unit of work of a block of these kernels: some chunks of a row, one for each of the block's first `warps` warps.
// The last warp does everything else. A block takes every n-th unit; only the first takes a division.
struct ViewUnit {
    uint32_t row;
    uint32_t part;

    // The first unit of block `number`.
    __device__ __forceinline__ ViewUnit(const LlView& view, uint32_t number) {
        const DivMod at = divide(number, view.parts, view.parts_reciprocal);
        row = at.quotient;
        part = at.remainder;
    }
    __device__ __forceinline__ void next(const LlView& view) {
        row += view.step;
        part += view.step_parts;
        if (part >= view.parts) {
            part -= view.parts;
            ++row;
        }
    }
    __device__ __forceinline__ Chunk chunk(const LlShape& shape, const LlView& view) const {
        return {shape, part * view.warps + warp_idx()};
    }
};

__device__ __forceinline__ bool is_last_warp() { return warp_idx() == num_warps() - 1; }

// Where row `row` begins in a bank.
__device__ __forceinline__ uint64_t view_row(const LlShape& shape, uint64_t row) { return row * shape.row_bytes; }

// Loads what a block must know besides StartState before it does anything.
__device__ __forceinline__ void load_owners(const LlView& view, uint32_t (&owner)[LL_VIEW_BANKS]) {
#pragma unroll
    for (uint32_t bank = 0; bank < LL_VIEW_BANKS; ++bank) {
        owner[bank] = ld_relaxed_gpu(&view.state->owner[bank]);
    }
}

// ---- Waits, whose failures are reported as a block ends -------------------------------------------

// The first wait that a block has given up, in its shared memory.
struct LateWaitOfBlock {
    // 0 if there is none; else four bytes, from the highest: 1 + what was awaited; the fault; the rank that has failed,
    // if any; the rank that was waited for.
    uint32_t awaited;
    uint64_t since;
};
static_assert(MAX_PEERS <= 256, "ranks are bytes of `awaited`");

// As keep_waiting (wait.cuh), but it only records a failure, and calls nothing: the loops around its calls need the
// registers.
__device__ __noinline__ static uint64_t keep_waiting_for(const LlCommon& common, LateWaitOfBlock& late, uint32_t what,
                                                         uint32_t rank, uint32_t epoch, uint64_t start) {
    if (ld_relaxed_cta_shared(&late.awaited) != 0 || has_failed(common.wait)) {
        return kGivenUp;
    }
    Operation<OneNode> op(common, OneNode{common.peers});
    op.resume(epoch);
    const uint64_t now = globaltimer_ns();
    start = start == 0 ? now : start;
    uint32_t got = 0;
    const uint32_t fault = fault_of_wait(op, rank, now - start, got);
    if (fault == FAULT_NONE) {
        return start;
    }
    late.since = start;
    st_release_cta_shared(&late.awaited, (what + 1) << 24 | fault << 16 | got << 8 | rank);
    return kGivenUp;
}

// A thread reports what it, or another thread of its block, has given up. Called as the block ends.
template <typename Op>
__device__ __forceinline__ void report_late(const Op& op, const LateWaitOfBlock& late) {
    const uint32_t awaited = ld_relaxed_cta_shared(&late.awaited);
    if (awaited != 0) {
        fail(op.common, awaited >> 16 & 0xff, {(awaited >> 24) - 1, awaited & 0xff, op.epoch}, op.epoch,
             awaited >> 8 & 0xff, globaltimer_ns() - late.since);
    }
}

// A thread waits until `has_come()`; false if it gives up.
template <typename Op, typename HasCome>
__device__ __forceinline__ bool await(const Op& op, LateWaitOfBlock& late, uint32_t what, uint32_t rank,
                                      HasCome has_come) {
    return poll_until(has_come,
                      [&](uint64_t start) { return keep_waiting_for(op.common, late, what, rank, op.epoch, start); });
}

// ---- Chunks of rows ------------------------------------------------------------------------------

// Signals the flag of a chunk that contains kSentinel, that of `row` in the operation's bank. All lanes call it, after
// their stores.
template <typename Op>
__device__ __forceinline__ void signal_chunk(const Op& op, uint32_t peer, uint32_t row, uint32_t chunk) {
    sync_warp();
    if (lane_idx() == 0) {
        signal(op.at(peer).row(row).flags + chunk, op.packet(0));
    }
}

// A warp sends its chunk to the row at `to` on `peer`, whose flags are those of `row`.
template <typename Op>
__device__ __forceinline__ void send_chunk_to(const Op& op, uint32_t peer, Remote<uint8_t> to, uint32_t row,
                                              const Chunk& chunk, const Vec16& vec, bool with_sentinel) {
    if (chunk.holds()) {
        put(as<Vec16>(to + chunk.lane_byte()), vec);
    }
    if (with_sentinel) {
        signal_chunk(op, peer, row, chunk.index);
    }
}

// In place of the time at which a wait first read the clock: the chunk has arrived.
constexpr uint64_t kIsThere = kGivenUp - 1;

// Whether the flag of a chunk says that it has arrived. All lanes call it.
template <typename Op>
__device__ __forceinline__ bool is_flagged(const Op& op, uint32_t row, uint32_t chunk) {
    return flagged_lanes(op, lane_idx() == 0 ? op.here().row(row).flags + chunk : nullptr).any();
}

// A warp waits for its chunk of row `row.index` from `row.source`; false if there is no such row. `row` says whether
// the row may come, and whether it is known how many come. After a wait that was given up `vec` is undefined.
template <typename Op, typename Row>
__device__ __forceinline__ bool await_chunk(const Op& op, const LlView& view, LateWaitOfBlock& late, const Row& row,
                                            const Chunk& chunk, Vec16& vec) {
    const bool holds = chunk.holds();
    const uint32_t number = row.source * op.common.shape.max_tokens + row.index;
    const uint8_t* from = view.rows + view_row(op.common.shape, number);
    const auto* at = reinterpret_cast<const Vec16*>(from + chunk.lane_byte());
    vec = {{0, 0, 0, 0}};
    uint64_t start = 0;
    uint32_t polls = 0;
#pragma unroll 1
    while (true) {
        if (holds) {
            vec = ld_relaxed_sys(at);
        }
        if (!any_lane(has_sentinel(vec)) || start == kIsThere) {
            return true;
        }
        if (!any_lane(row.may_come())) {
            return false;
        }
        spin_hint();
        if (view.gently != 0) {
            spin_gently();
        }
        if (++polls % kPollsOfChunk == 0 && any_lane(row.is_known())) {
            start = is_flagged(op, number, chunk.index)
                        ? kIsThere
                        : keep_waiting_for(op.common, late, WAIT_ROW, row.source, op.epoch, start);
            if (any_lane(start == kGivenUp)) {
                return true;
            }
        }
    }
}

// advance_epoch in two steps, so that nothing waits for the atomic: count_block counts this block as started, and
// `advance` uses the result in the block's last thread. It returns true in one thread of the kernel, once all blocks
// have started: that thread may write what blocks load at their start.
template <typename Op>
__device__ __forceinline__ uint32_t count_block(const Op& op) {
    return threadIdx.x == blockDim.x - 1 && op.sends()
               ? inc_relaxed_gpu(&op.common.channel_state->blocks_started, gridDim.x - 1)
               : gridDim.x;
}
template <typename Op>
__device__ __forceinline__ bool advance(const Op& op, uint32_t counted) {
    const bool has_last = counted == gridDim.x - 1;
    if (has_last) {
        st_relaxed_gpu(&op.common.channel_state->epoch, op.epoch);
    }
    return has_last;
}
__device__ __forceinline__ void set_owner(const LlView& view, uint32_t owner) {
    st_relaxed_gpu(&view.state->owner[view.bank], owner);
}

}  // namespace nccl_ep
