// Addresses in other ranks' memory, and the only functions that store there.
//
// Every rank has a window that all others map. Remote<T> is an address in any rank's window: kernels offset it and pass
// it to the stores of this file, but cannot dereference it. What this rank reads is in its own window, where an address
// is a plain pointer, Own<T>. Code that describes the layout of windows is a template over the two. A fabric without
// mapped windows needs its own put and its own arrival rule: here receivers poll the words that are stored.
//
//   put         unordered data: a receiver polls the words themselves, or a signal follows
//   put_value   one atomic word, unordered: a packet that is its own flag, or a word behind a fence
//   put_bulk    bytes of shared memory by the bulk copy engine; the caller commits and waits
//   signal      one word, released after all that this thread did or observed before
//
// Besides its window a rank has objects: memory with the caller's tensors that its peers map, too. Peers also load from
// objects:
//
//   get_bulk    bytes to shared memory by the bulk copy engine; they count towards a barrier
#pragma once

#include "../base/warp.cuh"
#include "params/common.h"

namespace nccl_ep {

// Whether a rank takes part in the group's operations. Loops over peers that send or wait call this, so masking a rank
// needs a change in one place only. Today every rank is active; the proofs that banks and slots are free
// (ll/protocol.cuh, ht/rings.cuh) rest on that.
__device__ __forceinline__ constexpr bool is_active(const PeerTable&, uint32_t /*rank*/) {
    return true;
}

template <typename T>
using Own = T*;

template <typename T>
class Remote {
   public:
    __device__ __forceinline__ Remote() : mapped_(nullptr) {}
    __device__ __forceinline__ explicit Remote(T* mapped) : mapped_(mapped) {}

    // The address `count` elements further on.
    __device__ __forceinline__ Remote operator+(uint64_t count) const {
        return Remote(mapped_ + count);
    }
    // Only for the functions of this file.
    __device__ __forceinline__ T* mapped() const { return mapped_; }

   private:
    T* mapped_;
};

// Casts an address to another type.
template <typename To>
__device__ __forceinline__ Own<To> as(Own<uint8_t> at) {
    return reinterpret_cast<To*>(at);
}
template <typename To>
__device__ __forceinline__ Remote<To> as(Remote<uint8_t> at) {
    return Remote<To>(reinterpret_cast<To*>(at.mapped()));
}

// The window of `rank`, which may be this rank.
__device__ __forceinline__ Remote<uint8_t> window_of(const PeerTable& peers, uint32_t rank) {
    return Remote<uint8_t>(peers.window[rank]);
}

__device__ __forceinline__ Own<uint8_t> own_window(const PeerTable& peers) {
    return peers.window[peers.rank];
}

// The memory of object `object` on `rank`, as this rank maps it. `objects` is [HT_MAX_OBJECTS][ranks].
__device__ __forceinline__ Remote<uint8_t> object_of(const uint64_t* objects, const PeerTable& peers, uint32_t object,
                                                     uint32_t rank) {
    return Remote<uint8_t>(reinterpret_cast<uint8_t*>(objects[uint64_t{object} * peers.ranks + rank]));
}

// The address that `lane` holds. All lanes call it.
__device__ __forceinline__ Remote<uint8_t> remote_of_lane(Remote<uint8_t> at, uint32_t lane) {
    return Remote<uint8_t>(shuffle(at.mapped(), lane));
}

// Four words, which may arrive separately.
__device__ __forceinline__ void put(Remote<Vec16> to, const Vec16& value) {
    st_relaxed_sys(to.mapped(), value);
}

// A warp copies `bytes`, a multiple of 16. To announce them, a fence and then a put_value or signal must follow.
__device__ __forceinline__ void put_by_lanes(Remote<uint8_t> to, const uint8_t* from,
                                             uint32_t bytes) {
    Vec16* vecs = as<Vec16>(to).mapped();
    for (uint32_t i = lane_idx(); i < bytes / sizeof(Vec16); i += kWarpSize) {
        vecs[i] = reinterpret_cast<const Vec16*>(from)[i];
    }
}

#ifdef NCCL_EP_HAS_BULK_COPY
// One lane calls it; the store joins the group of the lane's next commit.
__device__ __forceinline__ void put_bulk(Remote<uint8_t> to, const uint8_t* shared_from,
                                         uint32_t bytes) {
    bulk_store(to.mapped(), shared_from, bytes);
}

// One lane calls it.
__device__ __forceinline__ void get_bulk(void* shared_to, Remote<uint8_t> from, uint32_t bytes, uint64_t* barrier) {
    bulk_load(shared_to, from.mapped(), bytes, barrier);
}
#endif

// A warp copies `bytes`, a multiple of 16, of data that it has acquired.
__device__ __forceinline__ void get_by_lanes(uint8_t* to, Remote<uint8_t> from, uint32_t bytes) {
    for (uint32_t i = lane_idx(); i < bytes / sizeof(Vec16); i += kWarpSize) {
        reinterpret_cast<Vec16*>(to)[i] = ld_relaxed_sys(as<Vec16>(from).mapped() + i);
    }
}

__device__ __forceinline__ void put_value(Remote<uint64_t> to, uint64_t value) {
    st_relaxed_sys(to.mapped(), value);
}

// Two consecutive words at once; `to` is aligned to 16 bytes.
__device__ __forceinline__ void put_values(Remote<uint64_t> to, uint64_t first, uint64_t second) {
    st_relaxed_sys(to.mapped(), first, second);
}

__device__ __forceinline__ void put_value(Remote<uint32_t> to, uint32_t value) {
    st_relaxed_sys(to.mapped(), value);
}

__device__ __forceinline__ void signal(Remote<uint64_t> to, uint64_t value) {
    st_release_sys(to.mapped(), value);
}

__device__ __forceinline__ void signal(Remote<uint32_t> to, uint32_t value) {
    st_release_sys(to.mapped(), value);
}

}  // namespace nccl_ep
