// One warp of a sending block, the herald, announces the rows that the others have completed.
//
// Before a row may be announced, all that was written of it must be visible to its receiver. The fence
// that makes it so waits for much more than that row: while many rows are under way it takes as long
// as sending one (docs/performance.md). So those who send make none: they post what they have
// completed in a mailbox and go on, and the herald makes one fence for all that lies in the mailboxes
// then. What a warp did before its post is covered: the post is a release and the herald's look an
// acquire within the block, then comes the fence, then the announcement.
#pragma once

#include "ht.cuh"

namespace nccl_ep {

constexpr uint32_t kMailClosed = 0xffffffffu;

// In shared memory: one for each of up to kWarpSize warps, zero at first.
struct Mailboxes {
    // Posts so far, and how many of them were announced.
    uint32_t posted[kWarpSize];
    uint32_t announced[kWarpSize];
    // Rows of the last post.
    uint32_t rows[kWarpSize];
};

struct Announcement {
    uint32_t peer;
    uint32_t sequence;
};

// The list of `warp`: the end of its shared memory.
__device__ __forceinline__ Announcement* announcements(const HtCommon& common, uint8_t* carriers,
                                                       uint32_t warp) {
    uint8_t* end = carriers + (warp + 1) * common.warp_bytes;
    return reinterpret_cast<Announcement*>(end) - HT_MAX_TOP_K;
}

// All threads of the block call it before a barrier.
__device__ inline void clear_mailboxes(Mailboxes& boxes) {
    if (threadIdx.x < kWarpSize) {
        boxes.posted[threadIdx.x] = 0;
        boxes.announced[threadIdx.x] = 0;
    }
}

// The sending warp's side.
class Mailbox {
   public:
    // `list` has room for a row per lane.
    __device__ Mailbox(Mailboxes& boxes, Announcement* list) : boxes_(boxes), list_(list) {}

    // Posts the rows of the lanes that have one. They are complete as far as lane 0 can see.
    __device__ __forceinline__ void post(bool has_row, uint32_t peer, uint32_t sequence) {
        wait_announced();
        const uint32_t with_row = __ballot_sync(kAllLanes, has_row);
        if (has_row) {
            list_[__popc(with_row & ((1u << lane_idx()) - 1))] = {peer, sequence};
        }
        ++posts_;
        __syncwarp();
        if (lane_idx() == 0) {
            boxes_.rows[warp_idx()] = __popc(with_row);
            st_release_cta_shared(&boxes_.posted[warp_idx()], posts_);
        }
    }

    __device__ __forceinline__ void close() {
        wait_announced();
        if (lane_idx() == 0) {
            st_release_cta_shared(&boxes_.posted[warp_idx()], kMailClosed);
        }
    }

   private:
    // The herald waits for nobody, so this ends.
    __device__ __forceinline__ void wait_announced() {
        while (ld_acquire_cta_shared(&boxes_.announced[warp_idx()]) != posts_) {
            shared_spin_hint();
        }
        __syncwarp();
    }

    Mailboxes& boxes_;
    Announcement* list_;
    uint32_t posts_ = 0;
};

// The herald's work until all of `warps` mailboxes are closed: each lane looks after one of them.
__device__ inline void announce_posts(const Ring& ring, Mailboxes& boxes, uint8_t* carriers) {
    const uint32_t box = lane_idx();
    bool is_open = box < ring.common.copy_warps;
    uint32_t seen = 0;
    while (__ballot_sync(kAllLanes, is_open) != 0) {
        const uint32_t posted = is_open ? ld_acquire_cta_shared(&boxes.posted[box]) : seen;
        is_open = is_open && posted != kMailClosed;
        const bool is_new = is_open && posted != seen;
        if (__ballot_sync(kAllLanes, is_new) == 0) {
            shared_spin_hint();
            continue;
        }
        fence_acq_rel_sys();
        if (is_new) {
            const Announcement* list = announcements(ring.common, carriers, box);
            for (uint32_t i = 0; i < boxes.rows[box]; ++i) {
                announce_row(ring, list[i].peer, list[i].sequence);
            }
            seen = posted;
            st_release_cta_shared(&boxes.announced[box], posted);
        }
        __syncwarp();
    }
}

}  // namespace nccl_ep
