// Numbers rounded to e4m3: 8 bits, of which 4 are the exponent and 3 the mantissa.
//
// Rounded to nearest, ties to even. What is larger than 448, infinities included, becomes 448; any NaN
// becomes 0x7f. Chips before sm_89 have no instruction for it; integers give the same bits.
#pragma once

#include "primitive.cuh"

namespace nccl_ep {

constexpr uint32_t kE4m3Most = 0x7e;
constexpr uint32_t kE4m3Nan = 0x7f;

// One number by integer arithmetic.
__device__ __forceinline__ uint32_t e4m3_by_integers(float value) {
    constexpr uint32_t kMantissaBits = 23;
    constexpr int32_t kLeastExponent = -6;  // of a normal e4m3
    constexpr uint32_t kMostAsF32 = 0x43e00000;  // 448
    constexpr uint32_t kInfinity = 0x7f800000;
    const uint32_t bits = __float_as_uint(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > kInfinity) {
        return kE4m3Nan;
    }
    const uint32_t sign = bits >> 24 & 0x80;
    if (magnitude >= kMostAsF32) {
        return sign | kE4m3Most;
    }
    const int32_t exponent = static_cast<int32_t>(magnitude >> kMantissaBits) - 127;
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 1u << kMantissaBits;
    // A subnormal e4m3 has fewer bits. Far below, and for the subnormals of f32, none are left.
    const int32_t missing = min(max(kLeastExponent - exponent, 0), 8);
    const uint32_t drop = kMantissaBits - 3 + missing;
    const uint32_t kept = mantissa >> drop;
    const uint32_t rest = mantissa & ((1u << drop) - 1);
    const uint32_t half = 1u << (drop - 1);
    const uint32_t up = rest > half || (rest == half && (kept & 1) != 0) ? 1 : 0;
    // `kept` has the leading one, which counts as 1 in the field of the exponent.
    const uint32_t field = static_cast<uint32_t>(max(exponent - kLeastExponent, 0));
    return sign | min((field << 3) + kept + up, kE4m3Most);
}

// Four numbers, the first in the lowest byte.
__device__ __forceinline__ uint32_t e4m3x4_from_f32(const float* in) {
#ifdef NCCL_EP_HAS_E4M3
    return e4m3x2_from_f32(in[0], in[1]) | e4m3x2_from_f32(in[2], in[3]) << 16;
#else
    return e4m3_by_integers(in[0]) | e4m3_by_integers(in[1]) << 8 | e4m3_by_integers(in[2]) << 16 |
           e4m3_by_integers(in[3]) << 24;
#endif
}

}  // namespace nccl_ep
