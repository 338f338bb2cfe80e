// A warp's piece of shared memory through which rows pass on their way from one place in global
// memory to others: by the copy engine where the chip has one, else by the lanes.
//
// All functions are called by whole warps. With the copy engine lane 0 does it all; a fence between
// ordinary accesses and those of the engine is here or named where it is the caller's to make.
#pragma once

#include "ht.cuh"

namespace nccl_ep {

// This thread's accesses to shared memory so far come before copies from there that start after it
// has met the copying thread.
__device__ __forceinline__ void settle_shared() {
#ifdef NCCL_EP_HAS_BULK_COPY
    fence_before_bulk();
#endif
}

class Carrier {
   public:
    // `memory` is this warp's, `barrier` its word in shared memory.
    __device__ Carrier(uint8_t* memory, uint32_t piece_bytes, uint64_t* barrier)
        : piece_(memory), tails_(memory + piece_bytes), barrier_(barrier) {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            mbarrier_init(barrier_, 1);
            fence_before_bulk();
        }
        __syncwarp();
#endif
    }

    // Behind the piece: what belongs to rows but is not theirs.
    __device__ uint8_t* tails() const { return tails_; }

    // The lanes' accesses to the tails so far come before the next load or store of them.
    __device__ __forceinline__ void settle_tails() {
        settle_shared();
        __syncwarp();
    }

    // Begins to fill the piece, and the tails unless `tail_bytes` is zero. What is there must have
    // been stored: wait_reusable.
    __device__ __forceinline__ void load(const uint8_t* from, uint32_t bytes,
                                         const uint8_t* tail_from, uint32_t tail_bytes) {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            // What the caller acquired comes before the engine's reads.
            fence_before_bulk();
            mbarrier_arrive_expect(barrier_, bytes + tail_bytes);
            bulk_load(piece_, from, bytes, barrier_);
            if (tail_bytes != 0) {
                bulk_load(tails_, tail_from, tail_bytes, barrier_);
            }
        }
#else
        copy(piece_, from, bytes);
        copy(tails_, tail_from, tail_bytes);
#endif
    }

    // Afterwards all lanes see what was loaded.
    __device__ __forceinline__ void wait_loaded() {
#ifdef NCCL_EP_HAS_BULK_COPY
        while (!mbarrier_test_wait(barrier_, parity_)) {
            shared_spin_hint();
        }
        parity_ ^= 1;
#endif
        __syncwarp();
    }

    // Begins to copy the piece out, as one of the stores of the next commit.
    __device__ __forceinline__ void store(uint8_t* to, uint32_t bytes) {
        store_from(piece_, to, bytes);
    }

    // Begins to copy something else of shared memory out.
    __device__ __forceinline__ void store_shared(const uint8_t* from, uint8_t* to,
                                                 uint32_t bytes) {
        store_from(from, to, bytes);
    }

    // Those who wait for stores wait for what was committed.
    __device__ __forceinline__ void commit() {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            bulk_store_commit();
        }
#endif
    }

    // The stores have read piece and tails.
    __device__ __forceinline__ void wait_reusable() {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            bulk_store_wait_read();
        }
#endif
        __syncwarp();
    }

    // The stores are complete as far as lane 0 can see, or each lane its own: a fence of a thread that
    // has met them covers them.
    __device__ __forceinline__ void wait_stored() {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            bulk_store_wait<0>();
        }
#endif
        __syncwarp();
    }

    // The same, but for those of the last commit.
    __device__ __forceinline__ void wait_stored_but_last() {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            bulk_store_wait<1>();
        }
#endif
        __syncwarp();
    }

   private:
    __device__ __forceinline__ void store_from(const uint8_t* from, uint8_t* to, uint32_t bytes) {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            bulk_store(to, from, bytes);
        }
#else
        copy(to, from, bytes);
#endif
    }

    // The lanes copy between shared and global memory.
    __device__ __forceinline__ static void copy(void* to, const void* from, uint32_t bytes) {
        for (uint32_t i = lane_idx(); i < bytes / sizeof(Vec16); i += kWarpSize) {
            static_cast<Vec16*>(to)[i] = static_cast<const Vec16*>(from)[i];
        }
    }

    uint8_t* piece_;
    uint8_t* tails_;
    uint64_t* barrier_;
    uint32_t parity_ = 0;
};

}  // namespace nccl_ep
