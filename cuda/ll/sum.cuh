// The weighted sum of rows that a warp computes, chunk by chunk.
#pragma once

#include "../base/numeric.cuh"
#include "topk_weights.cuh"

namespace nccl_ep {

// This lane's part of the sum of kChunks chunks.
template <typename Type, uint32_t kChunks>
struct Sum {
    float value[kChunks][Type::kPerVec];

    __device__ Sum() {
#pragma unroll
        for (uint32_t i = 0; i < kChunks; ++i) {
#pragma unroll
            for (uint32_t j = 0; j < Type::kPerVec; ++j) {
                value[i][j] = 0.0f;
            }
        }
    }
    __device__ __forceinline__ void add(const Vec16 (&vec)[kChunks], float weight) {
        if (is_masked(weight)) {
            return;
        }
#pragma unroll
        for (uint32_t i = 0; i < kChunks; ++i) {
            float row[Type::kPerVec];
            Type::unpack(vec[i], row);
#pragma unroll
            for (uint32_t j = 0; j < Type::kPerVec; ++j) {
                value[i][j] = __fmaf_rn(weight, row[j], value[i][j]);
            }
        }
    }
    __device__ __forceinline__ Vec16 rounded(uint32_t i) const { return Type::pack(value[i]); }
};

}  // namespace nccl_ep
