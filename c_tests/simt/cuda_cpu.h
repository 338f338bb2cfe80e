// The part of CUDA C++ that kernels use, for g++: qualifiers, built-in variables, warp and block
// operations, atomics. What is missing here does not compile; add it when a kernel needs it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "block.h"
#include "support.h"

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
// A block is one OS thread, so what its threads share is local to that OS thread.
#define __shared__ static thread_local
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(simt::Block::Current().dynamic_shared())

#define threadIdx (simt::Block::Current().ThreadIdx())
#define blockIdx (simt::Block::Current().BlockIdx())
#define blockDim (simt::Block::Current().BlockDim())
#define gridDim (simt::Block::Current().GridDim())

using std::max;
using std::min;

// ---- The whole block --------------------------------------------------------------------------
inline void __syncthreads() { simt::Block::Current().MeetBlock("__syncthreads", false); }

inline int __syncthreads_count(int vote) {
    return static_cast<int>(simt::Block::Current().MeetBlock("__syncthreads_count", vote != 0));
}

inline int __syncthreads_or(int vote) {
    return simt::Block::Current().MeetBlock("__syncthreads_or", vote != 0) != 0 ? 1 : 0;
}

inline int __syncthreads_and(int vote) {
    return simt::Block::Current().MeetBlock("__syncthreads_and", vote == 0) == 0 ? 1 : 0;
}

// ---- Arithmetic ---------------------------------------------------------------------------------
// Each rounded by itself, to nearest: as on x86 anyway, where nothing is fused.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

// ---- Warps ------------------------------------------------------------------------------------
namespace simt {

template <typename T>
uint64_t ToBits(T value) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "at most two registers");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(value));
    return bits;
}

template <typename T>
T FromBits(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// Lane `from` gives its value to the caller, which must be allowed to ask it.
template <typename T>
T Shuffle(const char* operation, uint32_t mask, T value, uint32_t from) {
    const WarpValues& all = Block::Current().MeetWarp(operation, mask, ToBits(value));
    if ((mask >> from & 1) == 0) Fail(std::string(operation) + " from a lane that the mask does not name");
    return FromBits<T>(all.of[from]);
}

}  // namespace simt

inline void __syncwarp(uint32_t mask = 0xffffffffu) { simt::Block::Current().MeetWarp("__syncwarp", mask, 0); }

template <typename T>
T __shfl_sync(uint32_t mask, T value, int lane) {
    return simt::Shuffle("__shfl_sync", mask, value, static_cast<uint32_t>(lane) % simt::kLanes);
}

template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int lanes) {
    const uint32_t own = threadIdx.x % simt::kLanes;
    return simt::Shuffle("__shfl_xor_sync", mask, value, (own ^ static_cast<uint32_t>(lanes)) % simt::kLanes);
}

inline uint32_t __ballot_sync(uint32_t mask, bool vote) {
    return simt::Block::Current().MeetWarp("__ballot_sync", mask, vote ? 1 : 0).not_zero;
}

inline int __any_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, !vote) == 0; }

template <typename T>
uint32_t __match_any_sync(uint32_t mask, T value) {
    const uint64_t own = simt::ToBits(value);
    const auto& all = simt::Block::Current().MeetWarp("__match_any_sync", mask, own);
    uint32_t same = 0;
    for (uint32_t lane = 0; lane < simt::kLanes; ++lane) {
        same |= (mask >> lane & 1) != 0 && all.of[lane] == own ? 1u << lane : 0;
    }
    return same;
}

// ---- Atomics: relaxed, as in CUDA. Those around them may notice, so others may run then. -------
namespace simt {

// Replaces *at by `change` of it and returns what was there before.
template <typename T, typename Change>
T Atomic(T* at, Change change) {
    Block& block = Block::Current();
    block.stores().LandAt(at);
    T before = __atomic_load_n(at, __ATOMIC_RELAXED);
    T after = change(before);
    while (!__atomic_compare_exchange_n(at, &before, after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        after = change(before);
    }
    block.MayYield();
    return before;
}

}  // namespace simt

template <typename T>
T atomicAdd(T* at, T value) {
    return simt::Atomic(at, [value](T old) { return static_cast<T>(old + value); });
}

template <typename T>
T atomicMax(T* at, T value) {
    return simt::Atomic(at, [value](T old) { return old < value ? value : old; });
}

template <typename T>
T atomicMin(T* at, T value) {
    return simt::Atomic(at, [value](T old) { return value < old ? value : old; });
}

template <typename T>
T atomicCAS(T* at, T expected, T value) {
    return simt::Atomic(at, [=](T old) { return old == expected ? value : old; });
}

// ---- Numbers ----------------------------------------------------------------------------------
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __ffs(uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<uint32_t>(bits)); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __uint_as_float(uint32_t bits) { return simt::FromBits<float>(bits); }
inline uint32_t __float_as_uint(float value) { return static_cast<uint32_t>(simt::ToBits(value)); }

template <typename T>
T __ldg(const T* from) {
    return *from;
}
