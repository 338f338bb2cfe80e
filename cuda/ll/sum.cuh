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
__device__ __forceinline__ void in_batches(uint32_t which, Load load, Use use) {
    while (which != 0) {
        ChunkData data[kBatch];
        uint32_t rest = which;
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
            if (rest != 0) {
                load(__ffs(rest) - 1, data[i]);
                rest &= rest - 1;
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
            if (which != 0) {
                use(__ffs(which) - 1, data[i]);
                which &= which - 1;
            }
        }
    }
}

}  // namespace nccl_ep
