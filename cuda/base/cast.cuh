// The cast of rows to e4m3 with a scale for each block of 128 or 32 elements (docs/formats.md has the formula).
//
// A warp casts 512 consecutive elements at a time, 16 in each lane; so 8 or 2 lanes share a scale. Multiplications
// and divisions are rounded one by one, as the CPU backend's are: results are equal bit for bit.
#pragma once

#include "../params/common.h"
#include "e4m3.cuh"
#include "numeric.cuh"
#include "warp.cuh"

namespace nccl_ep {

// Elements of a lane: one 16-byte access of e4m3.
constexpr uint32_t kCastElements = sizeof(Vec16);

// The scale of a block.
struct BlockScale {
    // What elements are multiplied with before they are rounded.
    float factor;
    // The scale as it is stored: the bits of a float32, or an exponent byte.
    uint32_t stored;

    // `most` is the largest magnitude of the block's elements, and not less than that of a block of zeros.
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

    // Casts the elements, of which none counts unless `is_there`; returns the scale of their block as it is stored.
    // All lanes call it.
    __device__ __forceinline__ uint32_t cast(const ScaledRows& rows, bool is_there, Vec16& out) const {
        const BlockScale scale(largest_of_block(rows, is_there), rows.form);
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            float elements[Number::kPerVec];
            Number::unpack(vec[i], elements);
#pragma unroll
            for (uint32_t j = 0; j < Number::kPerVec; ++j) {
                elements[j] = __fmul_rn(elements[j], scale.factor);
            }
#pragma unroll
            for (uint32_t j = 0; j < Number::kPerVec; j += 4) {
                out.word[(i * Number::kPerVec + j) / 4] = e4m3x4_from_f32(elements + j);
            }
        }
        return scale.stored;
    }

   private:
    __device__ __forceinline__ float largest_of_block(const ScaledRows& rows, bool is_there) const {
        constexpr uint32_t kLeast = 0x38d1b717;  // 1e-4: a block of zeros has a scale, too
        float most = __uint_as_float(kLeast);
        if (is_there) {
#pragma unroll
            for (uint32_t i = 0; i < kVecs; ++i) {
                most = Number::largest(vec[i], most);
            }
        }
        const uint32_t lanes = rows.block / kCastElements;
        for (uint32_t distance = 1; distance < lanes; distance *= 2) {
            most = larger(most, __shfl_xor_sync(kAllLanes, most, distance));
        }
        return most;
    }
};

}  // namespace nccl_ep
