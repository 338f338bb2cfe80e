// The context that all functions of a combine share.
#pragma once

#include "../layout/flat.cuh"
#include "credits.cuh"
#include "entries.cuh"
#include "notify.cuh"
#include "scheduler.cuh"
#include "scope.cuh"

namespace nccl_ep::ht_combine_impl {

// With fewer ring slots per sending warp than this, warps poll for credits themselves.
constexpr uint32_t kRowsPerSender = 4;

struct SharedStorage {
    HtPairs pairs;
    Scheduler scheduler;
    NotifyState notify_state;
    uint32_t next_token;
    uint64_t barriers[HT_COMBINE_THREADS / kWarpSize];
};
static_assert(sizeof(SharedStorage) <= HT_STATIC_SHARED_BYTES, "launches leave no more room");

// The input of a combine without zones: the caller has summed the experts' rows of a token into one.
struct SummedRows {
    static constexpr bool kZones = false;
    // The shared memory of a sending warp; with zones, also of a receiving one.
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
    BlockRange senders = {0, common.shape.send_blocks};
    // If all blocks send, all receive too, with the warps after the senders and the notifier.
    BlockRange receivers =
        senders.blocks == gridDim.x ? senders : BlockRange{senders.blocks, gridDim.x - senders.blocks};

    __device__ uint32_t rank() const { return common.peers.rank; }
    __device__ uint32_t ranks() const { return common.peers.ranks; }
    // Whether this warp receives; not used with zones.
    __device__ bool receives() const {
        return receivers.has_this_block() && (!senders.has_this_block() || warp_idx() > common.shape.copy_warps);
    }
    // The input row for row `index` from `home`.
    __device__ uint32_t row_from(uint32_t home, uint32_t index) const {
        return scope.template row<Layout>(shared.pairs, home, index);
    }
    // Whether there are so many senders that most of them wait for a slot anyway. Then each polls for itself. The
    // threshold was measured.
    __device__ bool senders_fill_rings() const {
        const uint32_t rows = (ranks() - 1) * (common.layout.units / WholeSlots::of_row());
        return senders.blocks * common.shape.copy_warps > rows / kRowsPerSender;
    }
};

}  // namespace nccl_ep::ht_combine_impl
