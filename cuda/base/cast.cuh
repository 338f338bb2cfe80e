// The cast of rows to e4m3 with a scale for each block of 128 or 32 elements (docs/formats.md has the formula).
//
// A warp casts 512 consecutive elements at a time, 16 per lane, so 8 or 2 lanes share a scale; high-throughput senders
// cast 64 per lane, or 32 of fp32 (../ht/cast_rows.cuh). Multiplications and divisions are rounded one by one, as in
// the CPU backend: results are equal bit for bit.
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
    // A subnormal e4m3 has fewer mantissa bits; far smaller values, f32 subnormals among them, have none left.
    const int32_t missing = min(max(kLeastExponent - exponent, 0), 8);
    const uint32_t drop = kMantissaBits - 3 + missing;
    const uint32_t kept = mantissa >> drop;
    const uint32_t rest = mantissa & ((1u << drop) - 1);
    const uint32_t half = 1u << (drop - 1);
    const uint32_t up = rest > half || (rest == half && (kept & 1) != 0) ? 1 : 0;
    // `kept` includes the leading one, which adds 1 to the exponent field.
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

// ---- Rows --------------------------------------------------------------------------------------

// Elements of a lane: one 16-byte access of e4m3.
constexpr uint32_t kCastElements = sizeof(Vec16);
// Lanes that share the largest block.
constexpr uint32_t kMostLanes = 128 / kCastElements;
// Lower bound of a block's largest magnitude, so that a block of zeros has a scale: 1e-4.
__device__ __forceinline__ float least_maximum() { return __uint_as_float(0x38d1b717); }

// The scale of a block.
struct BlockScale {
    // What elements are multiplied with before they are rounded.
    float factor;
    // The scale as it is stored: the bits of a float32, or an exponent byte.
    uint32_t stored;

    // `most` is the largest magnitude of the block's elements, at least least_maximum().
    __device__ BlockScale(float most, uint32_t form) {
        constexpr float kMost = 448.0f;
        constexpr uint32_t kInverseMost = 0x3b124925;  // 1/448
        constexpr uint32_t kMantissaBits = 23;
        constexpr uint32_t kMantissa = (1u << kMantissaBits) - 1;
        constexpr uint32_t kExponentOfInfinity = 0xff;
        stored = __float_as_uint(__fmul_rn(most, __uint_as_float(kInverseMost)));
        // An infinite scale is not rounded: no power of two is above it.
        if (form != SCALES_FLOAT && stored >> kMantissaBits != kExponentOfInfinity) {
            const uint32_t exponent = (stored >> kMantissaBits) + ((stored & kMantissa) != 0 ? 1 : 0);
            stored = exponent << kMantissaBits;
            factor = __uint_as_float((2 * 127 - exponent) << kMantissaBits);
        } else {
            factor = __fdiv_rn(kMost, most);
        }
        if (form == SCALES_EXPONENT) {
            stored >>= kMantissaBits;
        }
    }
};

// What a lane casts, as the caller's rows have it: 16 elements of type `Number` (numeric.cuh).
template <typename Number>
struct Uncast {
    static constexpr uint32_t kVecs = kCastElements / Number::kPerVec;
    // Bytes of the caller's row for each byte of the cast one.
    static constexpr uint32_t kBytesPerElement = sizeof(Vec16) / Number::kPerVec;
    Vec16 vec[kVecs];

    // The largest magnitude of the lane's block, at least least_maximum(); elements count only if `is_there`. All lanes
    // call it; calls for several accesses in a row overlap their shuffles.
    __device__ __forceinline__ float largest_of_block(const ScaledRows& rows, bool is_there) const {
        float most = least_maximum();
        if (is_there) {
#pragma unroll
            for (uint32_t i = 0; i < kVecs; ++i) {
                most = Number::largest(vec[i], most);
            }
        }
#pragma unroll
        for (uint32_t lanes = 1; lanes < kMostLanes; lanes *= 2) {
            const float other = shuffle_xor(most, lanes);
            most = lanes * kCastElements < rows.block ? larger(most, other) : most;
        }
        return most;
    }

    // Casts the elements of a block whose largest magnitude is `most`; returns its scale as it is stored.
    __device__ __forceinline__ uint32_t cast(const ScaledRows& rows, float most, Vec16& out) const {
        const BlockScale scale(most, rows.form);
        cast_by(scale.factor, out);
        return scale.stored;
    }
    // Casts the elements of a block whose scale is known.
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
    // A flag is not a magnitude.
    uint32_t cast(const ScaledRows&, bool, Vec16&) const = delete;
};

// Stores the scale of the block that begins at `element` of a row to the row's dense scales.
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
