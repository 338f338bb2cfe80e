// A warp's staging buffer: the shared memory through which rows pass on their way from one address in
// global memory to others, by the copy engine where the chip has one, else by the lanes.
//
// Whole warps call all functions. With the copy engine lane 0 does the work; fences between ordinary
// accesses and those of the engine are here, or named where the caller has to make them.
#pragma once

#include "rings.cuh"

namespace nccl_ep {

// Orders this thread's accesses to shared memory before bulk copies that are issued after the next barrier
// with the copying thread.
__device__ __forceinline__ void settle_shared() {
#ifdef NCCL_EP_HAS_BULK_COPY
    fence_shared_before_bulk();
#endif
}

// ---- Bulk stores of a warp, which lane 0 issues ---------------------------------------------------
// To a peer's memory.
__device__ __forceinline__ void store_from(const uint8_t* from, Remote<uint8_t> to, uint32_t bytes) {
#ifdef NCCL_EP_HAS_BULK_COPY
    if (lane_idx() == 0) {
        put_bulk(to, from, bytes);
    }
#else
    put_by_lanes(to, from, bytes);
#endif
}
// Waits until all stores are complete, except those of the last `Groups` commits: lane 0's, or without the copy engine
// each lane's own. A fence by a thread that has since synchronised with these lanes covers them.
template <uint32_t Groups>
__device__ __forceinline__ void wait_stored_but() {
#ifdef NCCL_EP_HAS_BULK_COPY
    if (lane_idx() == 0) {
        bulk_store_wait<Groups>();
    }
#endif
    sync_warp();
}

// With `kMeets` lanes synchronise after what one of them does alone and after each wait, so that the compiler knows the
// warp to be converged (cuda/README.md). That slows combines down: their senders are few, and wait for themselves.
template <bool kMeets>
class StagingOf {
   public:
    // `memory` is this warp's, `barrier` its word in shared memory.
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
    // Behind the chunk: what follows rows in their slots.
    __device__ uint8_t* tails() const { return tails_; }

    // Orders the lanes' accesses to the chunk and the tails before the next load or store of them.
    __device__ __forceinline__ void settle() {
        settle_shared();
        sync_warp();
    }

    // Starts loading what has come from a peer, as the caller has seen, into the chunk, and into the tails unless
    // `tail_bytes` is zero. Stores must have read both (wait_reusable), and the lanes' accesses must be settled.
    __device__ __forceinline__ void load_arrived(const uint8_t* from, uint32_t bytes,
                                                 const uint8_t* tail_from, uint32_t tail_bytes) {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            // What the caller acquired comes before the engine's reads.
            fence_global_before_bulk();
            mbarrier_arrive_expect(barrier_, bytes + tail_bytes);
            bulk_load(chunk_, from, bytes, barrier_);
            if (tail_bytes != 0) {
                bulk_load(tails_, tail_from, tail_bytes, barrier_);
            }
        }
        meet();
#else
        copy(chunk_, from, bytes);
        copy(tails_, tail_from, tail_bytes);
#endif
    }

    // The same for `bytes`, or none, that this kernel does not write, to `to` in the chunk; so it needs no fence for
    // global memory.
    __device__ __forceinline__ void load_to(uint8_t* to, const uint8_t* from, uint32_t bytes) {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            mbarrier_arrive_expect(barrier_, bytes);
            if (bytes != 0) {
                bulk_load(to, from, bytes, barrier_);
            }
        }
        meet();
#else
        copy(to, from, bytes);
#endif
    }

    // Afterwards all lanes see what was loaded.
    __device__ __forceinline__ void wait_loaded() {
#ifdef NCCL_EP_HAS_BULK_COPY
        while (!seen_by_all(mbarrier_test_wait(barrier_, parity_))) {
            shared_spin_hint();
        }
        parity_ ^= 1;
#endif
        sync_warp();
    }

    // Starts to copy the chunk out, in the bulk group that the next commit closes.
    template <typename To>
    __device__ __forceinline__ void store(To to, uint32_t bytes) {
        store_from(chunk_, to, bytes);
    }

    // The same for any of the block's shared memory.
    template <typename To>
    __device__ __forceinline__ void store_shared(const uint8_t* from, To to, uint32_t bytes) {
        store_from(from, to, bytes);
    }

    // Closes a bulk group (cp.async.bulk.commit_group): waits for stores are for committed groups.
    __device__ __forceinline__ void commit() {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            bulk_store_commit();
        }
        meet();
#endif
    }

    // Waits until the stores have read chunk and tails.
    __device__ __forceinline__ void wait_reusable() {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            bulk_store_wait_read();
        }
#endif
        sync_warp();
    }

    // Synchronises the lanes, if they are to meet.
    __device__ __forceinline__ static void meet() {
        if constexpr (kMeets) {
            sync_warp();
        }
    }
    __device__ __forceinline__ static bool seen_by_all(bool seen) { return kMeets ? !any_lane(!seen) : seen; }

    __device__ __forceinline__ void wait_stored() { wait_stored_but<0>(); }
    __device__ __forceinline__ void wait_stored_but_last() { wait_stored_but<1>(); }

   private:
    // To a slot of a peer.
    __device__ __forceinline__ void store_from(const uint8_t* from, Remote<uint8_t> to, uint32_t bytes) {
        nccl_ep::store_from(from, to, bytes);
        meet();
    }

    // To an output.
    __device__ __forceinline__ void store_from(const uint8_t* from, uint8_t* to, uint32_t bytes) {
#ifdef NCCL_EP_HAS_BULK_COPY
        if (lane_idx() == 0) {
            bulk_store(to, from, bytes);
        }
        meet();
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
