// Positions of threads in warp and block, collective operations of a warp, and how blocks and warps divide work.
//
// Everything that depends on the warp size or on warp intrinsics is here: kernels use neither intrinsics nor raw masks.
#pragma once

#include "primitive.cuh"

namespace nccl_ep {

constexpr uint32_t kWarpSize = 32;

__device__ __forceinline__ uint32_t lane_idx() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ uint32_t warp_idx() { return threadIdx.x / kWarpSize; }
__device__ __forceinline__ uint32_t num_warps() { return blockDim.x / kWarpSize; }

// A set of lanes of a warp: bit i is lane i.
struct LaneMask {
    uint32_t bits = 0;

    __device__ __forceinline__ static LaneMask all_lanes() { return {~uint32_t{0}}; }
    __device__ __forceinline__ bool any() const { return bits != 0; }
    __device__ __forceinline__ bool all() const { return bits == ~uint32_t{0}; }
    __device__ __forceinline__ bool has_this() const { return (bits >> lane_idx() & 1) != 0; }
    __device__ __forceinline__ uint32_t count() const { return __popc(bits); }
    // How many lanes of the set come before this lane.
    __device__ __forceinline__ uint32_t count_before() const {
        return __popc(bits & ((1u << lane_idx()) - 1));
    }
    // The first and the last lane of the set, which must not be empty.
    __device__ __forceinline__ uint32_t first() const { return __ffs(bits) - 1; }
    __device__ __forceinline__ uint32_t last() const { return kWarpSize - 1 - __clz(static_cast<int>(bits)); }
    __device__ __forceinline__ void drop_first() { bits &= bits - 1; }
    __device__ __forceinline__ void drop(uint32_t lane) { bits &= ~(1u << lane); }
    // The first lane from `lane` on, wrapping around; the set must not be empty.
    __device__ __forceinline__ uint32_t first_from(uint32_t lane) const {
        const uint32_t later = bits & (~uint32_t{0} << lane);
        return __ffs(later != 0 ? later : bits) - 1;
    }
    // The lanes after `lane`.
    __device__ __forceinline__ LaneMask behind(uint32_t lane) const {
        return {lane + 1 < kWarpSize ? bits & (~uint32_t{0} << (lane + 1)) : 0};
    }
    // The empty set unless `wanted`.
    __device__ __forceinline__ LaneMask only_if(bool wanted) const { return {wanted ? bits : 0}; }
    // How many consecutive lanes from `lane` on are in the set; if the run reaches the last lane, that many or more.
    __device__ __forceinline__ uint32_t run_from(uint32_t lane) const {
        return static_cast<uint32_t>(__ffs(~(bits >> lane))) - 1;
    }
    __device__ __forceinline__ LaneMask operator~() const { return {~bits}; }
    __device__ __forceinline__ LaneMask operator&(LaneMask other) const { return {bits & other.bits}; }
};

// ---- What all lanes of a warp call together ----------------------------------------------------
constexpr uint32_t kAllLanes = ~uint32_t{0};

// Makes what each lane wrote before visible to all lanes.
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
// warp_idx(), which the compiler knows here to be uniform in the warp.
__device__ __forceinline__ uint32_t warp_idx_of_all() { return shuffle(warp_idx(), 0); }
// The value of lane `lane_idx() ^ lanes`.
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, uint32_t lanes) {
    return __shfl_xor_sync(kAllLanes, value, lanes);
}

// Consecutive blocks of a grid that do one kind of work, and how they divide its units.
struct BlockRange {
    uint32_t first;
    uint32_t blocks;

    __device__ bool has_this_block() const {
        return blockIdx.x >= first && blockIdx.x < first + blocks;
    }
    __device__ uint32_t index() const { return blockIdx.x - first; }
    // Unit number `turn` of this block's units index(), index() + blocks, ...
    __device__ uint32_t unit(uint32_t turn) const { return turn * blocks + index(); }
    // Gives the calling warp the block's next unit. `next`, in shared memory, counts the turns taken; it starts at the
    // number of turns that warps take without calling this.
    __device__ uint32_t next_unit(uint32_t* next) const {
        uint32_t turn = 0;
        if (lane_idx() == 0) {
            turn = atomicAdd(next, 1u);
        }
        return unit(shuffle(turn, 0));
    }
};

}  // namespace nccl_ep
