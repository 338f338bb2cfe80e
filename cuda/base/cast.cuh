// The cast of rows to e4m3 with a scale for each block of 128 or 32 elements (docs/formats.md has the formula).
//
// A warp casts 512 consecutive elements at a time, 16 in each lane; so 8 or 2 lanes share a scale. Multiplications
// and divisions are rounded one by one, as the CPU backend's are: results are equal bit for bit.
#pragma once

#include "params/common.h"
#include "e4m3.cuh"
#include "numeric.cuh"
#include "warp.cuh"

namespace nccl_ep {

// Elements of a lane: one 16-byte access of e4m3.
constexpr uint32_t kCastElements = sizeof(Vec16);
// Lanes of the largest block.
constexpr uint32_t kMostLanes = 128 / kCastElements;

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

    // The largest magnitude of the lane's block, and not less than that of a block of zeros. No element counts unless
    // `is_there`. All lanes call it: in a row for several accesses, whose shuffles then overlap.
    __device__ __forceinline__ float largest_of_block(const ScaledRows& rows, bool is_there) const {
        constexpr uint32_t kLeast = 0x38d1b717;  // 1e-4
        float most = __uint_as_float(kLeast);
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
