// A warp's staging buffer: the shared memory through which rows pass from one address in global memory to others, moved
// by the copy engine if the GPU has one, else by the lanes.
//
// Whole warps call all functions. With the copy engine lane 0 does the work. The fences between ordinary accesses and
// those of the engine are here, or are named where the caller has to make them.
#pragma once

#include "rings.cuh"

namespace nccl_ep {

// Orders this thread's accesses to shared memory before bulk copies that another thread issues after the next barrier.
__device__ __forceinline__ void fence_for_bulk() {
#ifdef NCCL_EP_HAS_BULK_COPY
    fence_shared_before_bulk();
#endif
}

// ---- Bulk stores of a warp, which lane 0 issues ---------------------------------------------------
// Stores shared memory to a peer's memory.
__device__ __forceinline__ void store_from(const uint8_t* from, Remote<uint8_t> to, uint32_t bytes) {
#ifdef NCCL_EP_HAS_BULK_COPY
    if (lane_idx() == 0) {
        put_bulk(to, from, bytes);
    }
#else
    put_by_lanes(to, from, bytes);
#endif
}
// Waits until all stores except those of the last `Groups` commits are complete: lane 0's or, without the copy engine,
// each lane's own. A fence by a thread that has synchronized with these lanes since then covers them.
template <uint32_t Groups>
__device__ __forceinline__ void wait_stored_but() {
#ifdef NCCL_EP_HAS_BULK_COPY
    if (lane_idx() == 0) {
        bulk_store_wait<Groups>();
    }
#endif
    sync_warp();
}

// With `kConverges` the lanes synchronize after whatever one lane does alone and after each wait, so that the compiler
// knows the warp to be converged (cuda/README.md). That slows combines down, whose few senders wait for themselves.
template <bool kConverges>
class StagingOf {
   public:
    // `memory` is the buffer of this warp and `barrier` its mbarrier, both in shared memory.
    __device__ StagingOf(uint8_t* memory, uint32_t chunk_bytes, uint64_t* barrier)
        : chunk_(memory), tails_(memory + chunk_bytes), barrier_(barrier) {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            mbarrier_init(barrier_, 1);
            fence_shared_before_bulk();
        }
        sync_warp();
#endif
    }

    __device__ uint8_t* chunk() const { return chunk_; }
    // The tails, which follow rows in their slots; they are behind the chunk.
    __device__ uint8_t* tails() const { return tails_; }

    // Orders the lanes' accesses to the chunk and the tails before the next load or store of them.
    __device__ __forceinline__ void settle() {
        fence_for_bulk();
        sync_warp();
    }

    // Starts to load data that has arrived, as the caller has acquired, into the chunk and, unless `tail_bytes` is
    // zero, into the tails. Earlier stores must have read both (wait_reusable), and the lanes' accesses must be
    // settled.
    __device__ __forceinline__ void load_arrived(const uint8_t* from, uint32_t bytes,
                                                 const uint8_t* tail_from, uint32_t tail_bytes) {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            // The caller's acquire comes before the engine's loads.
            fence_global_before_bulk();
            mbarrier_arrive_expect(barrier_, bytes + tail_bytes);
            bulk_load(chunk_, from, bytes, barrier_);
            if (tail_bytes != 0) {
                bulk_load(tails_, tail_from, tail_bytes, barrier_);
            }
        }
        converge();
#else
        copy(chunk_, from, bytes);
        copy(tails_, tail_from, tail_bytes);
#endif
    }

    // As load_arrived, for bytes to `to` in the chunk that are not written while the kernel runs, so no fence for
    // global memory is needed. `bytes` may be 0.
    __device__ __forceinline__ void load_to(uint8_t* to, const uint8_t* from, uint32_t bytes) {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            mbarrier_arrive_expect(barrier_, bytes);
            if (bytes != 0) {
                bulk_load(to, from, bytes, barrier_);
            }
        }
        converge();
#else
        copy(to, from, bytes);
#endif
    }

    // Waits for the last load; afterwards all lanes see what was loaded.
    __device__ __forceinline__ void wait_loaded() {
#ifdef NCCL_EP_HAS_BULK_COPY
        while (!seen_by_all(mbarrier_test_wait(barrier_, parity_))) {
            shared_spin_hint();
        }
        parity_ ^= 1;
#endif
        sync_warp();
    }

    // Starts to store the chunk, in the bulk group that the next commit closes.
    template <typename To>
    __device__ __forceinline__ void store(To to, uint32_t bytes) {
        store_from(chunk_, to, bytes);
    }

    // Starts to store any of the block's shared memory, likewise.
    template <typename To>
    __device__ __forceinline__ void store_shared(const uint8_t* from, To to, uint32_t bytes) {
        store_from(from, to, bytes);
    }

    // Closes a bulk group; waits for stores are for committed groups.
    __device__ __forceinline__ void commit() {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            bulk_store_commit();
        }
        converge();
#endif
    }

    // Waits until the stores have read chunk and tails, which may then be overwritten.
    __device__ __forceinline__ void wait_reusable() {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            bulk_store_wait_read();
        }
#endif
        sync_warp();
    }

    // Synchronizes the lanes, with kConverges.
    __device__ __forceinline__ static void converge() {
        if constexpr (kConverges) {
            sync_warp();
        }
    }
    __device__ __forceinline__ static bool seen_by_all(bool seen) { return kConverges ? !any_lane(!seen) : seen; }

    __device__ __forceinline__ void wait_stored() { wait_stored_but<0>(); }
    __device__ __forceinline__ void wait_stored_but_last() { wait_stored_but<1>(); }

   private:
    // Stores to a slot of a peer.
    __device__ __forceinline__ void store_from(const uint8_t* from, Remote<uint8_t> to, uint32_t bytes) {
        nccl_ep::store_from(from, to, bytes);
        converge();
    }

    // Stores to an output of this rank.
    __device__ __forceinline__ void store_from(const uint8_t* from, uint8_t* to, uint32_t bytes) {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            bulk_store(to, from, bytes);
        }
        converge();
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

    uint8_t* chunk_;
    uint8_t* tails_;
    uint64_t* barrier_;
    uint32_t parity_ = 0;
};

namespace ht_dispatch_impl {
using Staging = StagingOf<true>;
}
namespace ht_combine_impl {
using Staging = StagingOf<false>;
}

}  // namespace nccl_ep
