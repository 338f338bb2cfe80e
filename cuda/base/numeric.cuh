// How the 16 bytes of a row are to be read as numbers, and numbers rounded to them.
//
// Sums are in fp32 whatever the rows are made of; "rounded" is to nearest, ties to even.
#pragma once

#include "ptx.cuh"

namespace nccl_ep {

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
};

}  // namespace nccl_ep
