// A ring of stages in shared memory through which a warp moves parts of rows, several at a time. Stages are filled one
// after the other, and used in the same order. All lanes call all functions.
#pragma once

#include "staging.cuh"

namespace nccl_ep {

class Pipeline {
   public:
    // `memory` is this warp's, and `barriers` has an mbarrier for each stage; both are in shared memory.
    __device__ Pipeline(uint8_t* memory, uint32_t stage_bytes, uint32_t stages, uint64_t* barriers)
        : memory_(memory), barriers_(barriers), stage_bytes_(stage_bytes), stages_(stages) {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
#pragma unroll 1
            for (uint32_t i = 0; i < stages; ++i) {
                mbarrier_init(barriers + i, 1);
            }
            fence_shared_before_bulk();
            // The block's acquires come before the engine's loads.
            fence_global_before_bulk();
        }
#endif
        sync_warp();
    }

    // Begins to fill the next stage with `bytes` in all. Lanes and stores must have read its old content, ensured by
    // settle or commit_and_wait_read_but_last.
    __device__ __forceinline__ uint8_t* begin_filling(uint32_t bytes) {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            mbarrier_arrive_expect(barriers_ + filling_, bytes);
        }
#else
        (void)bytes;
#endif
        return memory_ + filling_ * stage_bytes_;
    }
    // Copies some of the bytes, from a peer's memory or this rank's, to `to` in the stage.
    __device__ __forceinline__ void fill(uint8_t* to, Remote<uint8_t> from, uint32_t bytes) {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            get_bulk(to, from, bytes, barriers_ + filling_);
        }
#else
        get_by_lanes(to, from, bytes);
#endif
    }
    // As fill, from the addresses of all `lanes`; each copy goes `part_bytes` behind the one before.
    __device__ __forceinline__ void fill_each(uint8_t* to, LaneMask lanes, Remote<uint8_t> of_lane, uint32_t offset,
                                              uint32_t bytes, uint32_t part_bytes) {
#ifdef NCCL_EP_HAS_BULK_COPY
        sync_warp();
        if (lanes.has_this()) {
            get_bulk(to + lanes.count_before() * part_bytes, of_lane + offset, bytes, barriers_ + filling_);
        }
#else
        for (LaneMask left = lanes; left.any(); left.drop_first(), to += part_bytes) {
            get_by_lanes(to, remote_of_lane(of_lane, left.first()) + offset, bytes);
        }
#endif
    }
    __device__ __forceinline__ void end_filling() { filling_ = filling_ + 1 == stages_ ? 0 : filling_ + 1; }

    // Waits until the oldest unused stage is full.
    __device__ __forceinline__ const uint8_t* wait_full() {
#ifdef NCCL_EP_HAS_BULK_COPY
        while (!mbarrier_test_wait(barriers_ + using_, parity_)) {
            shared_spin_hint();
        }
#endif
        sync_warp();
        return memory_ + using_ * stage_bytes_;
    }
    __device__ __forceinline__ void end_using() {
        using_ = next_in_use();
        parity_ ^= using_ == 0;
    }
    // The stage that is filled next, the one in use, and the one that is used next.
    __device__ __forceinline__ uint32_t filling() const { return filling_; }
    __device__ __forceinline__ uint32_t in_use() const { return using_; }
    __device__ __forceinline__ uint32_t next_in_use() const { return using_ + 1 == stages_ ? 0 : using_ + 1; }

    // Stores `bytes` of shared memory to a rank.
    __device__ __forceinline__ void store(const uint8_t* from, Remote<uint8_t> to, uint32_t bytes) {
        store_from(from, to, bytes);
    }
    // Closes a group of stores, and waits until the stores of earlier groups have read their shared memory.
    __device__ __forceinline__ void commit_and_wait_read_but_last() {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            bulk_store_commit();
            bulk_store_wait_read<1>();
        }
#endif
        sync_warp();
    }
    __device__ __forceinline__ void wait_stored() { wait_stored_but<0>(); }
    // Orders the lanes' accesses to shared memory before the engine's next ones.
    __device__ __forceinline__ void settle() {
        fence_for_bulk();
        sync_warp();
    }

   private:
    uint8_t* memory_;
    uint64_t* barriers_;
    uint32_t stage_bytes_;
    uint32_t stages_;
    uint32_t filling_ = 0;
    uint32_t using_ = 0;
    uint32_t parity_ = 0;
};

// A position in the rows of the tokens that a warp moves: a token, and a part of its row.
struct PartCursor {
    uint32_t token;
    uint32_t part_bytes;
    uint32_t row_bytes;
    uint32_t offset = 0;

    __device__ __forceinline__ uint32_t bytes() const { return min(part_bytes, row_bytes - offset); }
    // Moves to the next part; after the last one `offset` is 0 again, for another token that the caller sets.
    __device__ __forceinline__ void advance() {
        offset += part_bytes;
        offset = offset < row_bytes ? offset : 0;
    }
};

}  // namespace nccl_ep
