// What the warps of a combine block share.
#pragma once

#include "../layout/flat.cuh"
#include "credits.cuh"
#include "entries.cuh"
#include "notify.cuh"
#include "scheduler.cuh"
#include "scope.cuh"

namespace nccl_ep::ht_combine_impl {

// With fewer ring slots for each sending warp, warps poll for credits themselves.
constexpr uint32_t kRowsPerSender = 4;

struct SharedStorage {
    HtPairs pairs;
    Scheduler scheduler;
    NotifyState notify_state;
    uint32_t next_token;
    uint64_t barriers[HT_COMBINE_THREADS / kWarpSize];
};
static_assert(sizeof(SharedStorage) <= HT_STATIC_SHARED_BYTES, "launches leave no more room");

// Rows that the caller has summed, as they lie where a dispatch without zones has put their tokens.
struct SummedRows {
    static constexpr bool kZones = false;
    // The shared memory of a sending warp; with zones, of any warp that copies.
    using Buffers = Staging;
    struct Nothing {};
    template <typename Block, typename Part>
    __device__ Nothing addends_of(const Block&, uint32_t, LaneMask, const Part&) const {
        return {};
    }
};

template <typename Scope, typename Partials, typename InputRows, typename LayoutOfRows = Flat>
struct Block {
    using Layout = LayoutOfRows;
    using Buffers = typename InputRows::Buffers;
    static constexpr bool kZones = InputRows::kZones;
    static constexpr bool kNodes = Partials::kNodes;
    const HtCombineParams& params;
    Scope scope;
    Partials partials;
    InputRows input;
    SharedStorage& shared;

    const HtCommon& common = params.common;
    Share senders = {0, common.shape.send_blocks};
    // If all blocks send, all receive too, with the warps after the senders and the notifier.
    Share receivers = senders.blocks == gridDim.x ? senders : Share{senders.blocks, gridDim.x - senders.blocks};

    __device__ uint32_t rank() const { return common.peers.rank; }
    __device__ uint32_t ranks() const { return common.peers.ranks; }
    // Whether this warp receives, if rows are not summed before they are sent.
    __device__ bool receives() const {
        return receivers.has_this_block() && (!senders.has_this_block() || warp_idx() > common.shape.copy_warps);
    }
    // The row of the input of row `index` from `home`.
    __device__ uint32_t row_from(uint32_t home, uint32_t index) const {
        return scope.template row<Layout>(shared.pairs, home, index);
    }
    // Whether there are so many senders that most wait for a slot anyway: then each polls for itself. The
    // threshold was measured.
    __device__ bool senders_fill_rings() const {
        const uint32_t rows = (ranks() - 1) * (common.layout.units / WholeSlots::of_row());
        return senders.blocks * common.shape.copy_warps > rows / kRowsPerSender;
    }
};

}  // namespace nccl_ep::ht_combine_impl
