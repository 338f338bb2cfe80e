// How the 16 bytes of a row are to be read as numbers, and numbers rounded to them.
//
// `largest` is the largest magnitude of the 16 bytes and of `known`, `largest_of` that of several; NaN do not count.
// Sums are in fp32 whatever the rows are made of; "rounded" is to nearest, ties to even.
#pragma once

#include "primitive.cuh"

namespace nccl_ep {

__device__ __forceinline__ float larger(float known, float magnitude) {
    return magnitude > known ? magnitude : known;  // `known` is a number
}

struct Bf16 {
    static constexpr uint32_t kPerVec = 8;
    __device__ static void unpack(const Vec16& v, float* out) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            out[2 * i] = __uint_as_float(v.word[i] << 16);
            out[2 * i + 1] = __uint_as_float(v.word[i] & 0xffff0000u);
        }
    }
    __device__ static Vec16 pack(const float* in) {
        Vec16 v;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            v.word[i] = bf16x2_from_f32(in[2 * i], in[2 * i + 1]);
        }
        return v;
    }
    __device__ static float largest(const Vec16& v, float known) {
        uint32_t both = v.word[0] & 0x7fff7fffu;
#pragma unroll
        for (uint32_t i = 1; i < 4; ++i) {
            both = max_bf16x2(both, v.word[i] & 0x7fff7fffu);
        }
        known = larger(known, __uint_as_float(both << 16));
        return larger(known, __uint_as_float(both & 0xffff0000u));
    }
    template <uint32_t count>
    __device__ static float largest_of(const Vec16* v, float known) {
        Vec16 both;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            both.word[i] = v[0].word[i] & 0x7fff7fffu;
#pragma unroll
            for (uint32_t j = 1; j < count; ++j) {
                both.word[i] = max_bf16x2(both.word[i], v[j].word[i] & 0x7fff7fffu);
            }
        }
        return largest(both, known);
    }
};

struct F16 {
    static constexpr uint32_t kPerVec = 8;
    __device__ static void unpack(const Vec16& v, float* out) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            out[2 * i] = f32_from_f16(static_cast<uint16_t>(v.word[i]));
            out[2 * i + 1] = f32_from_f16(static_cast<uint16_t>(v.word[i] >> 16));
        }
    }
    __device__ static Vec16 pack(const float* in) {
        Vec16 v;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            v.word[i] = f16_from_f32(in[2 * i]) | uint32_t{f16_from_f32(in[2 * i + 1])} << 16;
        }
        return v;
    }
    __device__ static float largest(const Vec16& v, float known) {
        uint32_t both = v.word[0] & 0x7fff7fffu;
#pragma unroll
        for (uint32_t i = 1; i < 4; ++i) {
            both = max_f16x2(both, v.word[i] & 0x7fff7fffu);
        }
        known = larger(known, f32_from_f16(static_cast<uint16_t>(both)));
        return larger(known, f32_from_f16(static_cast<uint16_t>(both >> 16)));
    }
    template <uint32_t count>
    __device__ static float largest_of(const Vec16* v, float known) {
        Vec16 both;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            both.word[i] = v[0].word[i] & 0x7fff7fffu;
#pragma unroll
            for (uint32_t j = 1; j < count; ++j) {
                both.word[i] = max_f16x2(both.word[i], v[j].word[i] & 0x7fff7fffu);
            }
        }
        return largest(both, known);
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
    __device__ static float largest(const Vec16& v, float known) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            known = larger(known, fabsf(__uint_as_float(v.word[i])));
        }
        return known;
    }
    template <uint32_t count>
    __device__ static float largest_of(const Vec16* v, float known) {
#pragma unroll
        for (uint32_t i = 0; i < count; ++i) {
            known = largest(v[i], known);
        }
        return known;
    }
};

}  // namespace nccl_ep
