// One warp of a sending block, the notifier, notifies the peers of the rows that the others have completed.
//
// Before a peer may be notified of a row, all that was written of it must be visible there. The fence that
// makes it so waits for much more than that row: while many rows are under way it takes as long as sending
// one (docs/development/high-throughput.md). So sending warps make none: they post what they have completed in a queue
// and go on, and the notifier makes one fence for all that is in the queues then. What a warp did before
// its post is covered: the post is a release and the notifier's load an acquire within the block, then
// comes the fence, then the notification. A sender posts a row only when the next one is under way, so that
// it never waits for a row alone.
#pragma once

#include "staging.cuh"

namespace nccl_ep {

constexpr uint32_t kQueueClosed = 0xffffffffu;

// In shared memory: the state of each warp's queue, of up to kWarpSize warps, zero at first. The queue itself
// is a ring of rows in the warp's own shared memory.
struct NotifyState {
    // Rows posted so far, and how many of them the peers were notified of.
    uint32_t posted[kWarpSize];
    uint32_t notified[kWarpSize];
};

// A row that is complete in its slot at `peer`.
struct Notification {
    uint32_t peer;
    uint32_t sequence;
};

// The most ranks that a token goes to.
constexpr uint32_t kQueueRows = HT_MAX_TOP_K;

// The queue of `warp`: the end of its shared memory.
__device__ __forceinline__ Notification* queue_of_warp(const HtCommon& common, uint8_t* staging,
                                                      uint32_t warp) {
    uint8_t* end = staging + (warp + 1) * common.shape.warp_bytes;
    return reinterpret_cast<Notification*>(end) - kQueueRows;
}

// All threads of the block call it before a barrier.
__device__ inline void clear_queues(NotifyState& state) {
    if (threadIdx.x < kWarpSize) {
        state.posted[threadIdx.x] = 0;
        state.notified[threadIdx.x] = 0;
    }
}

// The sending warp's side. Each lane may have a row that the warp sends to one peer.
template <typename Staging>
class NotifyQueueOf {
   public:
    __device__ NotifyQueueOf(NotifyState& state, Notification* rows, Staging& staging)
        : state_(state), rows_(rows), staging_(staging) {}

    // The stores committed last are those of these rows. They are posted once complete: by the next call, when later
    // stores are under way, or by flush.
    __device__ __forceinline__ void depart(bool has_row, uint32_t peer, uint32_t sequence) {
        staging_.wait_stored_but_last();
        post();
        has_row_ = has_row;
        row_ = {peer, sequence};
    }

    // Posts all rows that have departed: before a wait for a peer, who may be waiting for them.
    __device__ __forceinline__ void flush() {
        staging_.wait_stored();
        post();
    }

    // All is posted, and nothing departs any more.
    __device__ __forceinline__ void close() {
        wait_notified(0);
        if (lane_idx() == 0) {
            st_release_cta_shared(&state_.posted[warp_idx()], kQueueClosed);
        }
    }

   private:
    // Posts what has departed, which is complete as far as lane 0 can see.
    __device__ __forceinline__ void post() {
        const LaneMask with_row = ballot(has_row_);
        const uint32_t count = with_row.count();
        wait_notified(kQueueRows - count);
        if (has_row_) {
            rows_[(posted_ + with_row.count_before()) % kQueueRows] = row_;
        }
        has_row_ = false;
        posted_ += count;
        sync_warp();
        if (lane_idx() == 0) {
            st_release_cta_shared(&state_.posted[warp_idx()], posted_);
        }
        Staging::meet();
    }

    // Waits until the peers were notified of all but `others` of the rows posted. The notifier waits for
    // nobody, so this ends.
    __device__ __forceinline__ void wait_notified(uint32_t others) {
        while (!Staging::seen_by_all(posted_ - ld_acquire_cta_shared(&state_.notified[warp_idx()]) <= others)) {
            shared_spin_hint();
        }
        sync_warp();
    }

    NotifyState& state_;
    Notification* rows_;
    Staging& staging_;
    bool has_row_ = false;
    Notification row_ = {0, 0};
    uint32_t posted_ = 0;
};

// The notifier's work until all queues are closed: each lane serves one of them. `idle` is called in between.
template <typename Units, typename Idle>
__device__ __forceinline__ void notify_peers(const HtCommon& common, const Units& units,
                                             const HtPairs& pairs, NotifyState& state,
                                             uint8_t* staging, Idle idle) {
    const uint32_t warp = lane_idx();
    bool is_open = warp < common.shape.copy_warps;
    uint32_t notified = 0;
    while (ballot(is_open).any()) {
        idle();
        const uint32_t posted = is_open ? ld_acquire_cta_shared(&state.posted[warp]) : notified;
        is_open = is_open && posted != kQueueClosed;
        const bool is_new = is_open && posted != notified;
        if (!ballot(is_new).any()) {
            continue;
        }
        fence_acq_rel_sys();
        if (is_new) {
            const Notification* rows = queue_of_warp(common, staging, warp);
#pragma unroll (Units::kNoticesAtOnce)
            for (; notified != posted; ++notified) {
                const Notification row = rows[notified % kQueueRows];
                notify_row(common, units, pairs, row.peer, row.sequence);
            }
            st_release_cta_shared(&state.notified[warp], notified);
        }
        sync_warp();
    }
}

namespace ht_dispatch_impl {
using NotifyQueue = NotifyQueueOf<Staging>;
}
namespace ht_combine_impl {
using NotifyQueue = NotifyQueueOf<Staging>;
}

}  // namespace nccl_ep
