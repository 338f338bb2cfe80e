// A weighted sum of rows, chunk by chunk, in the lanes of a warp.
#pragma once

#include "../base/numeric.cuh"
#include "chunk.cuh"
#include "gates.cuh"

namespace nccl_ep {

// Rows of a token that are loaded together.
constexpr uint32_t kBatch = 4;

// This lane's part of a chunk of the sum.
template <typename Type>
struct Sum {
    float value[kChunkVecs][Type::kPerVec];

    __device__ Sum() {
#pragma unroll
        for (uint32_t i = 0; i < kChunkVecs; ++i) {
#pragma unroll
            for (uint32_t j = 0; j < Type::kPerVec; ++j) {
                value[i][j] = 0.0f;
            }
        }
    }

    __device__ void add(const ChunkData& data, const Chunk& chunk, float weight) {
        if (is_masked(weight)) {
            return;
        }
#pragma unroll
        for (uint32_t i = 0; i < kChunkVecs; ++i) {
            if (chunk.holds(i)) {
                float row[Type::kPerVec];
                Type::unpack(data.vec[i], row);
#pragma unroll
                for (uint32_t j = 0; j < Type::kPerVec; ++j) {
                    value[i][j] = __fmaf_rn(weight, row[j], value[i][j]);
                }
            }
        }
    }

    __device__ ChunkData rounded() const {
        ChunkData data;
#pragma unroll
        for (uint32_t i = 0; i < kChunkVecs; ++i) {
            data.vec[i] = Type::pack(value[i]);
        }
        return data;
    }
};

// Goes through the lanes of `which` in ascending order: `load(lane, data)` for several of them
// together, so that their latencies overlap, then `use(lane, data)` for each.
template <typename Load, typename Use>
__device__ __forceinline__ void in_batches(LaneMask which, Load load, Use use) {
    while (which.any()) {
        ChunkData data[kBatch];
        LaneMask rest = which;
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
            if (rest.any()) {
                load(rest.first(), data[i]);
                rest.drop_first();
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
            if (which.any()) {
                use(which.first(), data[i]);
                which.drop_first();
            }
        }
    }
}

}  // namespace nccl_ep
