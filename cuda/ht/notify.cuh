// The notifier: one warp of a sending block that notifies the peers of the rows that the block's other warps have sent.
//
// Before a peer is notified of a row, the whole row must be visible there, which takes a fence. A fence waits for much
// more than that row: while many rows are in flight it takes as long as sending one
// (docs/development/high-throughput.md). So sending warps make none: they post completed rows in a queue and go on, and
// the notifier makes one fence for everything that is in the queues then. It covers what a warp did before its post:
// the post is a release and the notifier's load an acquire within the block, then comes the fence, then the
// notification. A sender posts a row only when the next one is in flight, so that it never waits for a single row.
#pragma once

#include "staging.cuh"

namespace nccl_ep {

constexpr uint32_t kQueueClosed = 0xffffffffu;

// The state of the queues of up to kWarpSize warps, in shared memory, initially zero. A queue itself is a ring of rows
// in the warp's own shared memory.
struct NotifyState {
    // How many rows each warp has posted, and of how many of them the peers were notified.
    uint32_t posted[kWarpSize];
    uint32_t notified[kWarpSize];
};

// A row that is complete in its slot at `peer`.
struct Notification {
    uint32_t peer;
    uint32_t sequence;
};

// Rows of a queue: the most ranks that a token goes to.
constexpr uint32_t kQueueRows = HT_MAX_TOP_K;

// The queue of `warp`, at the end of its shared memory.
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

// The sending warp's side of its queue. Each lane may have a row that the warp sends to one peer.
template <typename Staging>
class NotifyQueueOf {
   public:
    __device__ NotifyQueueOf(NotifyState& state, Notification* rows, Staging& staging)
        : state_(state), rows_(rows), staging_(staging) {}

    // Takes the lanes' rows whose stores were committed last. They are posted once they are complete: by the next call,
    // when later stores are in flight, or by flush.
    __device__ __forceinline__ void enqueue(bool has_row, uint32_t peer, uint32_t sequence) {
        staging_.wait_stored_but_last();
        post();
        has_row_ = has_row;
        row_ = {peer, sequence};
    }

    // Waits for all enqueued rows and posts them: before a wait for a peer, which may be waiting for these rows.
    __device__ __forceinline__ void flush() {
        staging_.wait_stored();
        post();
    }

    // Closes the queue. Everything must have been posted.
    __device__ __forceinline__ void close() {
        wait_notified(0);
        if (lane_idx() == 0) {
            st_release_cta_shared(&state_.posted[warp_idx()], kQueueClosed);
        }
    }

   private:
    // Posts the enqueued rows, which are complete.
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
        Staging::converge();
    }

    // Waits until the peers were notified of all but `others` of the posted rows. This ends, as the notifier waits for
    // nobody.
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

// The notifier's work until all queues are closed. Each lane serves one queue; `idle` is called in between.
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
