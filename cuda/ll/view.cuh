// Views: rows of a rank-major dispatch that stay where they arrive, in a bank of views, which is the caller's tensor.
//
// A rank has LL_VIEW_BANKS banks of rows [ranks][max_tokens], rows of a source packed, in memory that its peers map
// beside its window. Their words hold kSentinel until data arrives, as in other banks (chunk.cuh); all else that a
// dispatch tells is in the bank of its epoch. The host chooses a dispatch's bank, by turns, so that the address is the
// same in each replay of a graph.
//
// Why a row is never written while somebody still reads it, or before its words hold kSentinel again
//
// A bank is *clean* if all words in which rows of peers arrive hold kSentinel. `LlViewState::owner` says that it is
// (0), or which dispatch has filled it, by its epoch. Owner and lengths of rows change between kernels only, in effect:
// the last block of a kernel to begin writes them once all have read them, and the next kernel in the group's order is
// the next to read them.
//
// - A dispatch owns its bank from then on. A combine cleans the bank if its owner is the handle's last rank-major
//   dispatch, whose epoch the handle keeps (0 if its rows were copied). Each warp writes kSentinel over a chunk of the
//   view after its own load of the same chunk of the caller's rows, which may be the view; if rows of the view have
//   another length, over its share of them. The experts have read the view by then, as it lives until the combine
//   begins. Own rows stay, as nobody polls them. The combine leaves the bank alone if it has another owner, or if its
//   rows lie there with another length.
// - A dispatch to a bank that is not clean cleans it first, with all its blocks. So does one whose rows, or scales,
//   have other lengths than the bank's last, and then all that those could reach: rows are then polled where own rows
//   lay, or scales, which are not cleaned (view_rows.cuh). All ranks know of the lengths alike, so none goes by what
//   its peers have told.
// - A rank writes rows to a peer's bank only if it knows from that peer that the bank is clean. In each operation of
//   these kernels a rank tells each peer which of its banks are clean as the kernel begins, less the one that a
//   dispatch is about to fill: `clean_word`, in a packet that it sends anyway. If the operation just before this one
//   told that the bank is clean, it still is: only an operation of that rank could change it, and that one was the
//   last. Else the sender waits for the peer's fingerprint of this operation, which a rank sends once its bank is
//   clean. That depends on no other rank, so the wait terminates. Taking banks by turns makes this wait rare: with
//   pairs one after the other, or two overlapping, the operation before has told.
// - Stores that clean come before all that a rank tells: those of an earlier kernel because it has ended, those of the
//   same kernel through the count of blocks that have cleaned and the release of the fingerprint. So a peer's rows come
//   later.
// - A reader of the previous operation's packet finds it, or one of a later operation, and then waits for the
//   fingerprint: packets of a bank are overwritten two operations later at the earliest.
//
// Nothing of this asks who took part: a rank whose combine did not clean says so itself.
#pragma once

#include "../layout/rank_major.cuh"
#include "chunk.cuh"
#include "params/ll_view.h"

namespace nccl_ep {

// In the packet of a source's count, its rows take the bits below.
constexpr uint32_t kCleanShift = 8 * sizeof(uint32_t) - LL_VIEW_BANKS;

// Which banks are clean, by the owners that a kernel finds as it begins. `filled` is the bank that it fills, or
// LL_VIEW_BANKS.
__device__ __forceinline__ uint32_t clean_word(const uint32_t (&owner)[LL_VIEW_BANKS], uint32_t filled) {
    uint32_t word = 0;
#pragma unroll
    for (uint32_t bank = 0; bank < LL_VIEW_BANKS; ++bank) {
        word |= owner[bank] == 0 && bank != filled ? 1u << (kCleanShift + bank) : 0;
    }
    return word;
}

// A unit of work of these kernels: some chunks of a row, one for each of the first `warps` warps of a block. Another
// warp, the last, does all else. A block takes every n-th one, without dividing again.
struct ViewUnit {
    uint32_t row;
    uint32_t part;

    // The first one of a block of this number.
    __device__ __forceinline__ ViewUnit(const LlView& view, uint32_t number) {
        const Divided at = divide(number, view.parts, view.parts_reciprocal);
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

// Where row number `row` of a bank begins in it.
__device__ __forceinline__ uint64_t view_row(const LlShape& shape, uint64_t row) { return row * shape.row_bytes; }

// What a block must know before it does anything, beside Start.
__device__ __forceinline__ void load_owners(const LlView& view, uint32_t (&owner)[LL_VIEW_BANKS]) {
#pragma unroll
    for (uint32_t bank = 0; bank < LL_VIEW_BANKS; ++bank) {
        owner[bank] = ld_relaxed_gpu(&view.state->owner[bank]);
    }
}

// ---- Waits, which are reported as a block ends ----------------------------------------------------

// A wait that a block has given up, in its shared memory.
struct LateOfBlock {
    // Of the first wait to be given up, a byte each: what was awaited, plus 1; the fault; the rank that has failed, if
    // one has; whom it waited for. 0 if there is none.
    uint32_t awaited;
    uint64_t since;
};
static_assert(MAX_PEERS <= 256, "ranks are bytes there");

// The slow path of each wait of these kernels: whether it must be given up, as nccl_ep::keep_waiting. It calls nothing
// and reports nothing, as the loops around its calls need the registers.
__device__ __noinline__ static uint64_t keep_waiting_for(const LlCommon& common, LateOfBlock& late, uint32_t what,
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

// A thread reports what it, or another one of its block, has given up. Called as a block ends.
template <typename Op>
__device__ __forceinline__ void report_late(const Op& op, const LateOfBlock& late) {
    const uint32_t awaited = ld_relaxed_cta_shared(&late.awaited);
    if (awaited != 0) {
        fail(op.common, awaited >> 16 & 0xff, {(awaited >> 24) - 1, awaited & 0xff, op.epoch}, op.epoch,
             awaited >> 8 & 0xff, globaltimer_ns() - late.since);
    }
}

// A thread waits until packets of the operation have come, as `has_come` says; false if it has given up.
template <typename Op, typename HasCome>
__device__ __forceinline__ bool await(const Op& op, LateOfBlock& late, uint32_t what, uint32_t rank, HasCome has_come) {
    return poll_until(has_come,
                      [&](uint64_t start) { return keep_waiting_for(op.common, late, what, rank, op.epoch, start); });
}

// ---- Chunks of rows, with what seldom happens to them apart ---------------------------------------

// All lanes, after storing a chunk that contains kSentinel: signals its flag, which is that of `row` in the operation's
// bank.
template <typename Op>
__device__ __forceinline__ void signal_chunk(const Op& op, uint32_t peer, uint32_t row, uint32_t chunk) {
    sync_warp();
    if (lane_idx() == 0) {
        signal(op.at(peer).row(row).flags + chunk, op.packet(0));
    }
}

// A warp sends its chunk to a row at `peer`, whose flags are those of `row`.
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

// Instead of the time at which a wait first read the clock: the chunk is there.
constexpr uint64_t kIsThere = kGivenUp - 1;

// Whether the flag of a chunk says that it is there; all lanes call it.
template <typename Op>
__device__ __forceinline__ bool is_flagged(const Op& op, uint32_t row, uint32_t chunk) {
    return flagged_lanes(op, lane_idx() == 0 ? op.here().row(row).flags + chunk : nullptr).any();
}

// A warp waits for its chunk of number `row.index` of the rows from `row.source`. False if the row does not come: `row`
// says whether it may, and whether that is known. After a wait that was given up `vec` holds anything.
template <typename Op, typename Row>
__device__ __forceinline__ bool await_chunk(const Op& op, const LlView& view, LateOfBlock& late, const Row& row,
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

// advance_epoch in two steps: count_block counts the block, and its last thread gets the number of blocks before;
// advance follows whenever that number is there. It is true in one thread of the kernel, once all blocks have begun:
// that one may write what they begin with.
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
