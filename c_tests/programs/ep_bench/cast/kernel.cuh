// The cast as a kernel: what an inference engine launches before a dispatch that only forwards.
// on_gpu.cu launches it, on_cpu.cpp runs it in the CPU build.
//
// Memory decides its speed: each row is read once and written once, in accesses of 16 and 8 bytes next to each
// other. A warp has 512 elements of a row; 16 neighbouring lanes, or 4, find the maximum of a block. Multiplications
// and divisions are rounded one by one, so results equal the library's casts bit for bit.
#pragma once

#include <cuda_fp8.h>

#include <cstddef>
#include <cstdint>

#include "programs/ep_bench/cast/cast.h"

namespace ep_bench::cast {

constexpr unsigned kLanes = 32;
constexpr unsigned kThreads = 256;  // of a block
constexpr unsigned kElements = 8;   // of an access: 16 bytes of bfloat16
constexpr unsigned kAccesses = 2;   // of a lane, under way at the same time
constexpr unsigned kStep = kLanes * kElements;
constexpr unsigned kPart = kAccesses * kStep;  // of a row, for a warp

constexpr float kMost = 448;    // the largest e4m3
constexpr float kLeast = 1e-4f;  // no maximum of a block is smaller

struct Elements {
    float value[kElements];
};

// bfloat16 is the upper half of a float32.
__device__ inline Elements Widen(const uint4& from) {
    const unsigned words[kElements / 2] = {from.x, from.y, from.z, from.w};
    Elements elements;
#pragma unroll
    for (unsigned i = 0; i < kElements / 2; ++i) {
        elements.value[2 * i] = __uint_as_float(words[i] << 16);
        elements.value[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
    return elements;
}

// Leaves a NaN out. fmaxf would, too, but not on every CPU.
__device__ inline float Larger(float known, float magnitude) { return magnitude > known ? magnitude : known; }

// The largest magnitude in the block of the lane's elements. All lanes of a warp call it.
template <unsigned kBlock>
__device__ float LargestOfBlock(const Elements& elements) {
    float most = kLeast;
#pragma unroll
    for (unsigned i = 0; i < kElements; ++i) most = Larger(most, fabsf(elements.value[i]));
#pragma unroll
    for (unsigned lanes = 1; lanes < kBlock / kElements; lanes *= 2) {
        most = Larger(most, __shfl_xor_sync(~0u, most, lanes));
    }
    return most;
}

struct Scale {
    float stored;
    float factor;  // of the elements
};

template <ScaleForm kForm>
__device__ Scale ScaleOf(float most) {
    const float scale = __fmul_rn(most, 1 / kMost);
    if (kForm == ScaleForm::kFloat) return {scale, __fdiv_rn(kMost, most)};
    constexpr unsigned kMantissa = 0x7fffff;
    constexpr unsigned kInfinity = 0xff;
    const unsigned exponent = (__float_as_uint(scale) + kMantissa) >> 23;  // rounded up
    const float inverse = __uint_as_float((2 * 127 - exponent) << 23);
    return {__uint_as_float(exponent << 23), exponent == kInfinity ? 0 : inverse};
}

__device__ inline unsigned RoundFour(const float* values, float factor) {
    const float2 low = {__fmul_rn(values[0], factor), __fmul_rn(values[1], factor)};
    const float2 high = {__fmul_rn(values[2], factor), __fmul_rn(values[3], factor)};
    return __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3) |
           static_cast<unsigned>(__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3)) << 16;
}

// A warp for each part of each row, `parts` of them.
template <unsigned kBlock, ScaleForm kForm>
__global__ void __launch_bounds__(kThreads, 8) CastRows(CastWork work, unsigned parts) {
    const unsigned lane = threadIdx.x % kLanes;
    const unsigned warp = (blockIdx.x * kThreads + threadIdx.x) / kLanes;
    const unsigned token = warp / parts;
    if (token >= work.tokens) return;
    const unsigned first = warp % parts * kPart + lane * kElements;
    const size_t row = size_t{token} * work.hidden;
    const auto* const rows = static_cast<const uint16_t*>(work.rows);
    uint4 loaded[kAccesses];
#pragma unroll
    for (unsigned i = 0; i < kAccesses; ++i) {
        const unsigned element = first + i * kStep;
        loaded[i] = make_uint4(0, 0, 0, 0);
        if (element < work.hidden) loaded[i] = __ldg(reinterpret_cast<const uint4*>(rows + row + element));
    }
    const unsigned blocks = (work.hidden + kBlock - 1) / kBlock;
#pragma unroll
    for (unsigned i = 0; i < kAccesses; ++i) {
        const unsigned element = first + i * kStep;
        const Elements elements = Widen(loaded[i]);
        const Scale scale = ScaleOf<kForm>(LargestOfBlock<kBlock>(elements));
        if (element < work.hidden) {
            const uint2 rounded = {RoundFour(elements.value, scale.factor),
                                   RoundFour(elements.value + kElements / 2, scale.factor)};
            *reinterpret_cast<uint2*>(static_cast<uint8_t*>(work.payload) + row + element) = rounded;
        }
        if (element < work.hidden && element % kBlock == 0) {
            const size_t at = size_t{token} * blocks + element / kBlock;
            if (kForm == ScaleForm::kExponent) {
                static_cast<uint8_t*>(work.scales)[at] = static_cast<uint8_t>(__float_as_uint(scale.stored) >> 23);
            } else {
                static_cast<float*>(work.scales)[at] = scale.stored;
            }
        }
    }
}

using Kernel = void (*)(CastWork, unsigned);

// What is launched: `blocks` blocks of kThreads threads.
struct Launch {
    Kernel kernel;  // NULL if there is no such cast
    unsigned blocks;
    unsigned parts;
};

inline Kernel KernelFor(const CastWork& work) {
    if (work.block == 32 && work.form == ScaleForm::kExponent) return CastRows<32, ScaleForm::kExponent>;
    if (work.block != 128) return nullptr;
    switch (work.form) {
        case ScaleForm::kFloat: return CastRows<128, ScaleForm::kFloat>;
        case ScaleForm::kPower: return CastRows<128, ScaleForm::kPower>;
        default: return CastRows<128, ScaleForm::kExponent>;
    }
}

inline Launch LaunchFor(const CastWork& work) {
    constexpr unsigned kWarps = kThreads / kLanes;
    const unsigned parts = (work.hidden + kPart - 1) / kPart;
    return {KernelFor(work), (work.tokens * parts + kWarps - 1) / kWarps, parts};
}

}  // namespace ep_bench::cast
