// Casts rows to e4m3 with one scale per block of 128 or 32 elements (formula: docs/formats.md).
//
// A warp casts 512 consecutive elements at a time, 16 per lane, so 8 or 2 lanes share a scale. High-throughput senders
// cast 64 per lane, or 32 of fp32 (../ht/cast_rows.cuh). No multiplication is fused, so results equal the CPU backend's
// bit for bit.
#pragma once

#include "params/common.h"
#include "numeric.cuh"
#include "warp.cuh"

namespace nccl_ep {

// ---- Numbers -----------------------------------------------------------------------------------
//
// e4m3 has 4 bits of exponent and 3 of mantissa. Values are rounded to nearest, ties to even; magnitudes above 448,
// infinities included, become 448, and any NaN becomes 0x7f. GPUs before sm_89 have no instruction for this; integer
// arithmetic gives the same bits.

constexpr uint32_t kE4m3Max = 0x7e;
constexpr uint32_t kE4m3Nan = 0x7f;

// Casts one number with integer arithmetic.
__device__ __forceinline__ uint32_t e4m3_by_integers(float value) {
    constexpr uint32_t kMantissaBits = 23;
    constexpr int32_t kLeastExponent = -6;  // of a normal e4m3
    constexpr uint32_t kMaxAsF32 = 0x43e00000;  // 448
    constexpr uint32_t kInfinity = 0x7f800000;
    const uint32_t bits = __float_as_uint(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > kInfinity) {
        return kE4m3Nan;
    }
    const uint32_t sign = bits >> 24 & 0x80;
    if (magnitude >= kMaxAsF32) {
        return sign | kE4m3Max;
    }
    const int32_t exponent = static_cast<int32_t>(magnitude >> kMantissaBits) - 127;
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 1u << kMantissaBits;
    // A subnormal e4m3 keeps fewer mantissa bits; much smaller values, f32 subnormals included, keep none.
    const int32_t missing = min(max(kLeastExponent - exponent, 0), 8);
    const uint32_t drop = kMantissaBits - 3 + missing;
    const uint32_t kept = mantissa >> drop;
    const uint32_t rest = mantissa & ((1u << drop) - 1);
    const uint32_t half = 1u << (drop - 1);
    const uint32_t up = rest > half || (rest == half && (kept & 1) != 0) ? 1 : 0;
    // The leading one of `kept` adds 1 to the exponent field.
    const uint32_t field = static_cast<uint32_t>(max(exponent - kLeastExponent, 0));
    return sign | min((field << 3) + kept + up, kE4m3Max);
}

// Casts four numbers; the first goes to the lowest byte.
__device__ __forceinline__ uint32_t e4m3x4_from_f32(const float* in) {
#ifdef NCCL_EP_HAS_E4M3
    return e4m3x2_from_f32(in[0], in[1]) | e4m3x2_from_f32(in[2], in[3]) << 16;
#else
    return e4m3_by_integers(in[0]) | e4m3_by_integers(in[1]) << 8 | e4m3_by_integers(in[2]) << 16 |
           e4m3_by_integers(in[3]) << 24;
#endif
}

// ---- Rows --------------------------------------------------------------------------------------

// Elements that a lane casts at a time: one 16-byte access of e4m3.
constexpr uint32_t kCastElements = sizeof(Vec16);
// Most lanes that share a block.
constexpr uint32_t kMaxBlockLanes = 128 / kCastElements;
// 1e-4: lower bound of a block's amax (largest magnitude), so that a block of zeros has a finite scale.
__device__ __forceinline__ float min_amax() { return __uint_as_float(0x38d1b717); }

// The scale of a block.
struct BlockScale {
    // Elements are multiplied by this before they are rounded.
    float factor;
    // The scale as it is stored: the bits of a float32, or an exponent byte.
    uint32_t stored;

    // `amax` is the block's, at least min_amax().
    __device__ BlockScale(float amax, uint32_t form) {
        constexpr float kMax = 448.0f;
        constexpr uint32_t kInverseMax = 0x3b124925;  // 1/448
        constexpr uint32_t kMantissaBits = 23;
        constexpr uint32_t kMantissa = (1u << kMantissaBits) - 1;
        constexpr uint32_t kExponentOfInfinity = 0xff;
        stored = __float_as_uint(__fmul_rn(amax, __uint_as_float(kInverseMax)));
        // An infinite scale is not rounded: no power of two is above it.
        if (form != SCALES_FLOAT && stored >> kMantissaBits != kExponentOfInfinity) {
            const uint32_t exponent = (stored >> kMantissaBits) + ((stored & kMantissa) != 0 ? 1 : 0);
            stored = exponent << kMantissaBits;
            factor = __uint_as_float((2 * 127 - exponent) << kMantissaBits);
        } else {
            factor = __fdiv_rn(kMax, amax);
        }
        if (form == SCALES_EXPONENT) {
            stored >>= kMantissaBits;
        }
    }
};

// What a lane casts at a time: 16 elements of the caller's type `Number` (numeric.cuh).
template <typename Number>
struct CastInput {
    static constexpr uint32_t kVecs = kCastElements / Number::kPerVec;
    // Bytes of an element in the caller's row; cast, it has one byte.
    static constexpr uint32_t kBytesPerElement = sizeof(Vec16) / Number::kPerVec;
    Vec16 vec[kVecs];

    // The amax of this lane's block, at least min_amax(); the lane's elements count only if `is_there`. All lanes call
    // it. Consecutive calls overlap their shuffles.
    __device__ __forceinline__ float block_amax(const ScaledRows& rows, bool is_there) const {
        float amax = min_amax();
        if (is_there) {
#pragma unroll
            for (uint32_t i = 0; i < kVecs; ++i) {
                amax = Number::amax(vec[i], amax);
            }
        }
#pragma unroll
        for (uint32_t lanes = 1; lanes < kMaxBlockLanes; lanes *= 2) {
            const float other = shuffle_xor(amax, lanes);
            amax = lanes * kCastElements < rows.block ? larger(amax, other) : amax;
        }
        return amax;
    }

    // Casts elements of a block with this `amax`; returns the block's scale as it is stored.
    __device__ __forceinline__ uint32_t cast(const ScaledRows& rows, float amax, Vec16& out) const {
        const BlockScale scale(amax, rows.form);
        cast_by(scale.factor, out);
        return scale.stored;
    }
    // Casts elements of a block whose scale is known.
    __device__ __forceinline__ void cast_by(float factor, Vec16& out) const {
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            float elements[Number::kPerVec];
            Number::unpack(vec[i], elements);
#pragma unroll
            for (uint32_t j = 0; j < Number::kPerVec; ++j) {
                elements[j] = __fmul_rn(elements[j], factor);
            }
#pragma unroll
            for (uint32_t j = 0; j < Number::kPerVec; j += 4) {
                out.word[(i * Number::kPerVec + j) / 4] = e4m3x4_from_f32(elements + j);
            }
        }
    }
    // An amax is not a flag: catches a call with `is_there` in its place.
    uint32_t cast(const ScaledRows&, bool, Vec16&) const = delete;
};

// Stores the scale of the block that begins at `element` of a row into the row's dense scales.
__device__ __forceinline__ void store_scale(const ScaledRows& rows, uint8_t* scales,
                                            uint32_t element, uint32_t stored) {
    const uint32_t number = element >> (__ffs(rows.block) - 1);  // a power of two
    if (rows.form == SCALES_EXPONENT) {
        scales[number] = static_cast<uint8_t>(stored);
    } else {
        reinterpret_cast<uint32_t*>(scales)[number] = stored;
    }
}

}  // namespace nccl_ep
