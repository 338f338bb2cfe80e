// The element types of rows: how 16 bytes of a row are unpacked to fp32, in which all sums are computed, and packed
// again, rounded to nearest, ties to even.
//
// `amax` is the largest magnitude of 16 bytes and of `known`, `amax_of` that of several vectors; NaNs are ignored.
#pragma once

#include "primitive.cuh"

namespace nccl_ep {

__device__ __forceinline__ float larger(float known, float magnitude) {
    return magnitude > known ? magnitude : known;  // so a NaN loses: `known` is a number
}

// What the 16-bit types share. `Number` unpacks the two numbers of a word, and takes elementwise maxima of two words.
template <typename Number>
struct PackedPairs {
    static constexpr uint32_t kPerVec = 8;
    static constexpr uint32_t kMagnitudes = 0x7fff7fffu;

    __device__ static void unpack(const Vec16& v, float* out) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            out[2 * i] = Number::low(v.word[i]);
            out[2 * i + 1] = Number::high(v.word[i]);
        }
    }
    __device__ static float amax(const Vec16& v, float known) {
        uint32_t both = v.word[0] & kMagnitudes;
#pragma unroll
        for (uint32_t i = 1; i < 4; ++i) {
            both = Number::max_pair(both, v.word[i] & kMagnitudes);
        }
        return larger(larger(known, Number::low(both)), Number::high(both));
    }
    template <uint32_t count>
    __device__ static float amax_of(const Vec16* v, float known) {
        Vec16 both;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            both.word[i] = v[0].word[i] & kMagnitudes;
#pragma unroll
            for (uint32_t j = 1; j < count; ++j) {
                both.word[i] = Number::max_pair(both.word[i], v[j].word[i] & kMagnitudes);
            }
        }
        return amax(both, known);
    }
};

struct Bf16 : PackedPairs<Bf16> {
    __device__ static float low(uint32_t pair) { return __uint_as_float(pair << 16); }
    __device__ static float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
    __device__ static uint32_t max_pair(uint32_t a, uint32_t b) { return max_bf16x2(a, b); }
    __device__ static Vec16 pack(const float* in) {
        Vec16 v;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            v.word[i] = bf16x2_from_f32(in[2 * i], in[2 * i + 1]);
        }
        return v;
    }
};

struct F16 : PackedPairs<F16> {
    __device__ static float low(uint32_t pair) { return f32_from_f16(static_cast<uint16_t>(pair)); }
    __device__ static float high(uint32_t pair) { return f32_from_f16(static_cast<uint16_t>(pair >> 16)); }
    __device__ static uint32_t max_pair(uint32_t a, uint32_t b) { return max_f16x2(a, b); }
    __device__ static Vec16 pack(const float* in) {
        Vec16 v;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            v.word[i] = f16_from_f32(in[2 * i]) | uint32_t{f16_from_f32(in[2 * i + 1])} << 16;
        }
        return v;
    }
};

struct F32 {
    static constexpr uint32_t kPerVec = 4;
    __device__ static void unpack(const Vec16& v, float* out) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            out[i] = __uint_as_float(v.word[i]);
        }
    }
    __device__ static Vec16 pack(const float* in) {
        Vec16 v;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            v.word[i] = __float_as_uint(in[i]);
        }
        return v;
    }
    __device__ static float amax(const Vec16& v, float known) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            known = larger(known, fabsf(__uint_as_float(v.word[i])));
        }
        return known;
    }
    template <uint32_t count>
    __device__ static float amax_of(const Vec16* v, float known) {
#pragma unroll
        for (uint32_t i = 0; i < count; ++i) {
            known = amax(v[i], known);
        }
        return known;
    }
};

}  // namespace nccl_ep
