// Views: rows of a rank-major dispatch that stay where they arrive, in a bank of views, which is the caller's tensor.
//
// A rank has LL_VIEW_BANKS banks of rows [ranks][max_tokens], rows of a source packed, in memory that its peers map
// beside its window. Their words hold kSentinel until data arrives, as in other banks (chunk.cuh); all else that a
// dispatch tells is in the bank of its epoch. The host chooses a dispatch's bank, by turns, so that the address is the
// same in each replay of a graph.
//
// Why a row is never written while somebody still reads it, or before its words hold kSentinel again
//
// A bank is *clean* if all words in which rows of peers arrive hold kSentinel. `LlViewState::owner` says so (0), or
// whose rows are there; it changes between kernels only, in effect: the last block of a kernel to begin writes it
// when all have read it, and the next kernel of the group's order is the next to read it.
//
// - A dispatch owns its bank from then on. A combine of that handle cleans it: each warp writes kSentinel over a
//   chunk of the view behind its own load of the same chunk of the caller's rows, which may be the view. The experts
//   have read the view by then, as a view lives until the combine begins. Own rows stay, as nobody polls them. Where
//   the bank has another owner by now, or the combine's rows another length, it leaves the bank alone.
// - A dispatch to a bank that is not clean cleans it first, with all its blocks. So does one whose rows have another
//   length than those before, which are polled where own rows were; all ranks know that alike, so none goes by what
//   its peers have told.
// - A rank writes rows to a peer's bank only if it knows from that peer that the bank is clean. In each operation of
//   these kernels a rank tells each peer which of its banks are clean as the kernel begins, less the one that a
//   dispatch is about to fill: `clean_word`, in a packet that it sends anyway. If the operation just before this one
//   told that the bank is clean, it still is: only an operation of that rank could change it, and that one was the
//   last. Else the sender waits for the peer's fingerprint of this operation, which a rank sends once its bank is
//   clean. That depends on no other rank, so the wait terminates. Banks by turns make this wait rare: of pairs one
//   after the other, or two overlapping, the operation before tells.
// - Stores that clean come before all that a rank tells: those of a kernel before by the end of it; those of the same
//   kernel by the count of blocks that have cleaned and the release of the fingerprint. So a peer's rows come later.
// - Whoever reads the packet of the operation before finds it, or one of a later operation, and then waits in the
//   other way: packets of a bank are overwritten two operations later at the earliest.
//
// Nothing of this asks who took part: a rank whose combine did not clean says so itself.
#pragma once

#include "../layout/rank_major.cuh"
#include "chunk.cuh"
#include "params/ll_view.h"

namespace nccl_ep {

// Rows in the packet of a source's count take the bits below.
constexpr uint32_t kCleanShift = 8 * sizeof(uint32_t) - LL_VIEW_BANKS;

// Which banks are clean, of owners that a kernel finds as it begins. `filled` is the one that it fills, or
// LL_VIEW_BANKS.
__device__ __forceinline__ uint32_t clean_word(const uint32_t (&owner)[LL_VIEW_BANKS], uint32_t filled) {
    uint32_t word = 0;
#pragma unroll
    for (uint32_t bank = 0; bank < LL_VIEW_BANKS; ++bank) {
        word |= owner[bank] == 0 && bank != filled ? 1u << (kCleanShift + bank) : 0;
    }
    return word;
}

// A unit of work of these kernels: some chunks of a token's row, one for each of the first `warps` warps of a block.
// Another warp, the last, does all else.
struct ViewUnit {
    uint32_t token;
    uint32_t part;

    __device__ __forceinline__ ViewUnit(const LlView& view, uint32_t unit) {
        const Divided at = divide(unit, view.parts, view.parts_reciprocal);
        token = at.quotient;
        part = at.remainder;
    }
    __device__ __forceinline__ Chunk chunk(const LlShape& shape, const LlView& view) const {
        return {shape, part * view.warps + warp_idx()};
    }
};

__device__ __forceinline__ bool is_last_warp() { return warp_idx() == num_warps() - 1; }

// Where row number `row` of a bank begins in it.
__device__ __forceinline__ uint64_t view_row(const LlShape& shape, uint64_t row) { return row * shape.row_bytes; }

// Instead of the owner of the operation's bank: rows of another length were there last.
constexpr uint32_t kOtherRows = ~uint32_t{0};

// What a block must know before it does anything, beside Start.
__device__ __forceinline__ void load_owners(const LlView& view, uint32_t row_bytes, uint32_t (&owner)[LL_VIEW_BANKS]) {
#pragma unroll
    for (uint32_t bank = 0; bank < LL_VIEW_BANKS; ++bank) {
        owner[bank] = ld_relaxed_gpu(&view.state->owner[bank]);
        const uint32_t before = ld_relaxed_gpu(&view.state->row_bytes[bank]);
        if (bank == view.bank && before != 0 && before != row_bytes) {
            owner[bank] = kOtherRows;
        }
    }
}

// The slow path of each wait of these kernels, of which a call takes little code.
__device__ __noinline__ static uint64_t keep_waiting_for(const LlCommon& common, uint32_t what, uint32_t rank,
                                                         uint32_t epoch, uint64_t start) {
    return keep_waiting_in(common, OneNode{common.peers}, epoch, {what, rank, epoch}, start, 0);
}

// A thread waits for a packet of the operation, and gives its data; 0 after a wait that was given up.
template <typename Op>
__device__ __forceinline__ uint32_t await_packet(const Op& op, const uint64_t* at, uint32_t what, uint32_t rank) {
    uint64_t packet;
    const bool ok = poll_until([&] { return packet_epoch(packet = ld_relaxed_sys(at)) == op.epoch; },
                               [&](uint64_t start) {
                                   return keep_waiting_for(op.common, what, rank, op.epoch, start);
                               });
    return ok ? packet_data(packet) : 0;
}

// ---- Chunks of rows, with what seldom happens to them apart ---------------------------------------

// All lanes, after a chunk was stored that has kSentinel in it: signals its flag. `row` is that of the bank of the
// epoch whose flags the chunk has.
__device__ __noinline__ static void signal_chunk(const LlCommon& common, uint32_t epoch, uint32_t peer, uint32_t row,
                                                 uint32_t chunk) {
    Operation<OneNode> op(common, OneNode{common.peers});
    op.resume(epoch);
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
        signal_chunk(op.common, op.epoch, peer, row, chunk.index);
    }
}

// Polls of a chunk between looks at its flag and at the clock.
constexpr uint32_t kPollsOfChunk = 16;
// Instead of the time at which a wait has looked at the clock first: the chunk is there.
constexpr uint64_t kIsThere = kGivenUp - 1;

// What a warp does once in kPollsOfChunk polls; its lanes get the same answer.
__device__ __noinline__ static uint64_t keep_waiting_for_chunk(const LlCommon& common, uint32_t epoch, uint32_t rank,
                                                               uint32_t row, uint32_t chunk, uint64_t start) {
    Operation<OneNode> op(common, OneNode{common.peers});
    op.resume(epoch);
    uint64_t* flag = op.here().row(row).flags + chunk;
    if (flagged_lanes(op, lane_idx() == 0 ? flag : nullptr).any()) {
        return kIsThere;
    }
    start = keep_waiting_for(common, WAIT_ROW, rank, epoch, start);
    return any_lane(start == kGivenUp) ? kGivenUp : start;
}

// A warp waits for its chunk of a row from `rank` that lies at `from`; its flags are those of `row`. After a wait
// that was given up it holds anything. `gently` pauses between polls.
template <typename Op>
__device__ __forceinline__ Vec16 await_chunk(const Op& op, const uint8_t* from, uint32_t row, const Chunk& chunk,
                                             uint32_t rank, bool gently) {
    const bool holds = chunk.holds();
    const auto* at = reinterpret_cast<const Vec16*>(from + chunk.lane_byte());
    Vec16 vec = {{0, 0, 0, 0}};
    uint64_t start = 0;
    uint32_t polls = 0;
#pragma unroll 1
    while (true) {
        if (holds) {
            vec = ld_relaxed_sys(at);
        }
        if (!any_lane(has_sentinel(vec))) {
            break;
        }
        spin_hint();
        if (gently) {
            spin_gently();
        }
        if (++polls % kPollsOfChunk == 0) {
            start = keep_waiting_for_chunk(op.common, op.epoch, rank, row, chunk.index, start);
            if (start >= kIsThere) {
                break;
            }
        }
    }
    if (start == kIsThere && holds) {
        vec = ld_relaxed_sys(at);
    }
    return vec;
}

// As advance_epoch, and sets the owner of the bank if there is one.
template <typename Op>
__device__ __forceinline__ void advance(const Op& op, const LlView& view, bool sets_owner, uint32_t owner) {
    if (threadIdx.x == blockDim.x - 1 && op.sends() &&
        inc_relaxed_gpu(&op.common.channel_state->blocks_started, gridDim.x - 1) == gridDim.x - 1) {
        st_relaxed_gpu(&op.common.channel_state->epoch, op.epoch);
        if (sets_owner) {
            st_relaxed_gpu(&view.state->owner[view.bank], owner);
        }
    }
}

}  // namespace nccl_ep
