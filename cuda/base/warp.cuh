// Where a thread stands in its warp and its block, and how blocks and warps share out units of work.
#pragma once

#include "ptx.cuh"

namespace nccl_ep {

constexpr uint32_t kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ uint32_t lane_idx() { return threadIdx.x % kWarpSize; }
// How many of `lanes`, a mask, come before this one.
__device__ __forceinline__ uint32_t lanes_before(uint32_t lanes) {
    return __popc(lanes & ((1u << lane_idx()) - 1));
}
__device__ __forceinline__ uint32_t warp_idx() { return threadIdx.x / kWarpSize; }
__device__ __forceinline__ uint32_t num_warps() { return blockDim.x / kWarpSize; }

// The pointer that `lane` holds. All lanes call it.
template <typename T>
__device__ __forceinline__ T* pointer_of_lane(T* pointer, uint32_t lane) {
    return reinterpret_cast<T*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
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
        return unit(__shfl_sync(kAllLanes, turn, 0));
    }
};

}  // namespace nccl_ep
