// Where a thread stands in its warp and block, what a warp does together, and how blocks and warps share out units of
// work.
//
// Everything that depends on the number of lanes, or on how they communicate, is here: kernels use neither warp
// intrinsics nor raw lane masks.
#pragma once

#include "primitive.cuh"

namespace nccl_ep {

constexpr uint32_t kWarpSize = 32;

__device__ __forceinline__ uint32_t lane_idx() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ uint32_t warp_idx() { return threadIdx.x / kWarpSize; }
__device__ __forceinline__ uint32_t num_warps() { return blockDim.x / kWarpSize; }

// Some of a warp's lanes: bit i is lane i.
struct LaneMask {
    uint32_t bits = 0;

    __device__ __forceinline__ static LaneMask all_lanes() { return {~uint32_t{0}}; }
    __device__ __forceinline__ bool any() const { return bits != 0; }
    __device__ __forceinline__ bool all() const { return bits == ~uint32_t{0}; }
    __device__ __forceinline__ bool has_this() const { return (bits >> lane_idx() & 1) != 0; }
    __device__ __forceinline__ uint32_t count() const { return __popc(bits); }
    // How many of them come before this lane.
    __device__ __forceinline__ uint32_t count_before() const {
        return __popc(bits & ((1u << lane_idx()) - 1));
    }
    // The first one, which must exist.
    __device__ __forceinline__ uint32_t first() const { return __ffs(bits) - 1; }
    // The last one, which must exist.
    __device__ __forceinline__ uint32_t last() const { return kWarpSize - 1 - __clz(static_cast<int>(bits)); }
    __device__ __forceinline__ void drop_first() { bits &= bits - 1; }
    __device__ __forceinline__ void drop(uint32_t lane) { bits &= ~(1u << lane); }
    // The first one from `lane` on, wrapping around; one must exist.
    __device__ __forceinline__ uint32_t first_from(uint32_t lane) const {
        const uint32_t later = bits & (~uint32_t{0} << lane);
        return __ffs(later != 0 ? later : bits) - 1;
    }
    // Those after `lane`.
    __device__ __forceinline__ LaneMask behind(uint32_t lane) const {
        return {lane + 1 < kWarpSize ? bits & (~uint32_t{0} << (lane + 1)) : 0};
    }
    // None unless `wanted`.
    __device__ __forceinline__ LaneMask only_if(bool wanted) const { return {wanted ? bits : 0}; }
    // Length of the run of set lanes that begins at `lane`; any number not less if the run reaches the last lane.
    __device__ __forceinline__ uint32_t run_from(uint32_t lane) const {
        return static_cast<uint32_t>(__ffs(~(bits >> lane))) - 1;
    }
    __device__ __forceinline__ LaneMask operator~() const { return {~bits}; }
    __device__ __forceinline__ LaneMask operator&(LaneMask other) const { return {bits & other.bits}; }
};

// ---- What all lanes of a warp call together ----------------------------------------------------
constexpr uint32_t kAllLanes = ~uint32_t{0};

// What each lane wrote before is visible to all lanes afterwards.
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
// The lanes whose vote is true.
__device__ __forceinline__ LaneMask ballot(int vote) { return {__ballot_sync(kAllLanes, vote)}; }
__device__ __forceinline__ bool any_lane(int vote) { return __any_sync(kAllLanes, vote); }
__device__ __forceinline__ bool all_lanes(int vote) { return __all_sync(kAllLanes, vote); }
// The lanes whose value equals this one's.
template <typename T>
__device__ __forceinline__ LaneMask match(T value) {
    return {__match_any_sync(kAllLanes, value)};
}
// The value of `lane`.
template <typename T>
__device__ __forceinline__ T shuffle(T value, uint32_t lane) {
    return __shfl_sync(kAllLanes, value, lane);
}
template <typename T>
__device__ __forceinline__ T* shuffle(T* pointer, uint32_t lane) {
    return reinterpret_cast<T*>(shuffle(reinterpret_cast<unsigned long long>(pointer), lane));
}
// warp_idx(), in a form that the compiler knows to be uniform in the warp. All lanes call it.
__device__ __forceinline__ uint32_t warp_idx_of_all() { return shuffle(warp_idx(), 0); }
// The value of lane `lane_idx() ^ lanes`.
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, uint32_t lanes) {
    return __shfl_xor_sync(kAllLanes, value, lanes);
}

// The blocks of a grid that do one kind of work, and which units of it each of them takes.
struct Share {
    uint32_t first;
    uint32_t blocks;

    __device__ bool has_this_block() const {
        return blockIdx.x >= first && blockIdx.x < first + blocks;
    }
    __device__ uint32_t index() const { return blockIdx.x - first; }
    // The block's unit number `turn` of index, index + blocks, ...
    __device__ uint32_t unit(uint32_t turn) const { return turn * blocks + index(); }
    // Hands the units to the warps, one after the other. `next` is a counter in shared memory; it starts
    // at the number of turns that were taken without asking it.
    __device__ uint32_t next_unit(uint32_t* next) const {
        uint32_t turn = 0;
        if (lane_idx() == 0) {
            turn = atomicAdd(next, 1u);
        }
        return unit(shuffle(turn, 0));
    }
};

}  // namespace nccl_ep
