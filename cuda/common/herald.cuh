// One warp of a sending block, the herald, announces the rows that the others have completed.
//
// Before a row may be announced, all that was written of it must be visible to its receiver. The fence
// that makes it so waits for much more than that row: while many rows are under way it takes as long
// as sending one (docs/performance.md). So those who send make none: they post what they have
// completed in a mailbox and go on, and the herald makes one fence for all that lies in the mailboxes
// then. What a warp did before its post is covered: the post is a release and the herald's look an
// acquire within the block, then comes the fence, then the announcement. A sender posts a row only when
// the next one is under way, so that it never waits for a row alone.
#pragma once

#include "carrier.cuh"

namespace nccl_ep {

constexpr uint32_t kMailClosed = 0xffffffffu;

// In shared memory: one for each of up to kWarpSize warps, zero at first. A mailbox is a ring of rows
// in the warp's own shared memory.
struct Mailboxes {
    // Rows so far that were posted, and how many of them were announced.
    uint32_t posted[kWarpSize];
    uint32_t announced[kWarpSize];
};

struct Announcement {
    uint32_t peer;
    uint32_t sequence;
};

// A token goes to no more ranks than that.
constexpr uint32_t kMailboxRows = HT_MAX_TOP_K;

// The ring of `warp`: the end of its shared memory.
__device__ __forceinline__ Announcement* mailbox_rows(const HtCommon& common, uint8_t* carriers,
                                                      uint32_t warp) {
    uint8_t* end = carriers + (warp + 1) * common.warp_bytes;
    return reinterpret_cast<Announcement*>(end) - kMailboxRows;
}

// All threads of the block call it before a barrier.
__device__ inline void clear_mailboxes(Mailboxes& boxes) {
    if (threadIdx.x < kWarpSize) {
        boxes.posted[threadIdx.x] = 0;
        boxes.announced[threadIdx.x] = 0;
    }
}

// The sending warp's side. Each lane may have a row to one peer of what the warp sends at a time.
class Mailbox {
   public:
    __device__ Mailbox(Mailboxes& boxes, Announcement* rows, Carrier& carrier)
        : boxes_(boxes), rows_(rows), carrier_(carrier) {}

    // The stores of these rows have been committed last. They are posted when they are complete: not
    // before the next ones are under way, or by flush.
    __device__ __forceinline__ void depart(bool has_row, uint32_t peer, uint32_t sequence) {
        carrier_.wait_stored_but_last();
        post();
        has_row_ = has_row;
        row_ = {peer, sequence};
    }

    // Posts all rows that have departed: before a wait for a peer, who may be waiting for them.
    __device__ __forceinline__ void flush() {
        carrier_.wait_stored();
        post();
    }

    // Nothing departs any more.
    __device__ __forceinline__ void close() {
        flush();
        wait_announced(0);
        if (lane_idx() == 0) {
            st_release_cta_shared(&boxes_.posted[warp_idx()], kMailClosed);
        }
    }

   private:
    // What has departed is complete as far as lane 0 can see.
    __device__ __forceinline__ void post() {
        const uint32_t with_row = __ballot_sync(kAllLanes, has_row_);
        const uint32_t count = __popc(with_row);
        wait_announced(kMailboxRows - count);
        if (has_row_) {
            rows_[(posted_ + lanes_before(with_row)) % kMailboxRows] = row_;
        }
        has_row_ = false;
        posted_ += count;
        __syncwarp();
        if (lane_idx() == 0) {
            st_release_cta_shared(&boxes_.posted[warp_idx()], posted_);
        }
    }

    // All but `others` of the rows posted are announced. The herald waits for nobody, so this ends.
    __device__ __forceinline__ void wait_announced(uint32_t others) {
        while (posted_ - ld_acquire_cta_shared(&boxes_.announced[warp_idx()]) > others) {
            shared_spin_hint();
        }
        __syncwarp();
    }

    Mailboxes& boxes_;
    Announcement* rows_;
    Carrier& carrier_;
    bool has_row_ = false;
    Announcement row_ = {0, 0};
    uint32_t posted_ = 0;
};

// The herald's work until all mailboxes are closed: each lane looks after one of them. `idle` is called
// in between.
template <typename Idle>
__device__ __forceinline__ void announce_posts(const Ring& ring, Mailboxes& boxes,
                                               uint8_t* carriers, Idle idle) {
    const uint32_t box = lane_idx();
    bool is_open = box < ring.common.copy_warps;
    uint32_t announced = 0;
    while (__ballot_sync(kAllLanes, is_open) != 0) {
        idle();
        const uint32_t posted = is_open ? ld_acquire_cta_shared(&boxes.posted[box]) : announced;
        is_open = is_open && posted != kMailClosed;
        const bool is_new = is_open && posted != announced;
        if (__ballot_sync(kAllLanes, is_new) == 0) {
            continue;
        }
        fence_acq_rel_sys();
        if (is_new) {
            const Announcement* rows = mailbox_rows(ring.common, carriers, box);
            for (; announced != posted; ++announced) {
                const Announcement row = rows[announced % kMailboxRows];
                announce_row(ring, row.peer, row.sequence);
            }
            st_release_cta_shared(&boxes.announced[box], announced);
        }
        __syncwarp();
    }
}

}  // namespace nccl_ep
