// Sums of rows in fp32, in the order of lanes; a warp adds a part of several rows at a time.
#pragma once

#include "../base/numeric.cuh"
#include "../base/warp.cuh"

namespace nccl_ep::ht_combine_impl {

// A lane's accesses to a row that are in flight together, and rows that are loaded together.
constexpr uint32_t kVecs = 4;
constexpr uint32_t kRows = 4;

template <typename Type>
__device__ __forceinline__ void clear_sum(float (&sum)[kVecs][Type::kPerVec]) {
#pragma unroll
    for (uint32_t v = 0; v < kVecs; ++v) {
#pragma unroll
        for (uint32_t j = 0; j < Type::kPerVec; ++j) {
            sum[v][j] = 0.0f;
        }
    }
}

// Rounds this lane's sums, which are for its accesses from number `first` on, and stores them to the row at `out`.
template <typename Type>
__device__ __forceinline__ void store_sum(const float (&sum)[kVecs][Type::kPerVec], uint32_t first,
                                          uint32_t vecs, Vec16* out) {
#pragma unroll
    for (uint32_t v = 0; v < kVecs; ++v) {
        const uint32_t at = first + v * kWarpSize + lane_idx();
        if (at < vecs) {
            st_row(out + at, Type::pack(sum[v]));
        }
    }
}

// One warp adds the rows whose addresses `lanes` have in `of_lane`, kVecs accesses per lane from number `first` on.
template <typename Type>
__device__ __forceinline__ void add_rows(float (&sum)[kVecs][Type::kPerVec], LaneMask lanes,
                                         const uint8_t* of_lane, uint32_t first, uint32_t vecs) {
    for (LaneMask left = lanes; left.any();) {
        Vec16 data[kRows][kVecs];
        LaneMask rest = left;
#pragma unroll
        for (uint32_t i = 0; i < kRows; ++i) {
            if (!rest.any()) {
                break;
            }
            const Vec16* row = reinterpret_cast<const Vec16*>(shuffle(of_lane, rest.first()));
#pragma unroll
            for (uint32_t v = 0; v < kVecs; ++v) {
                const uint32_t at = first + v * kWarpSize + lane_idx();
                if (at < vecs) {
                    data[i][v] = ld_relaxed_sys(row + at);
                }
            }
            rest.drop_first();
        }
#pragma unroll
        for (uint32_t i = 0; i < kRows; ++i) {
            if (!left.any()) {
                break;
            }
#pragma unroll
            for (uint32_t v = 0; v < kVecs; ++v) {
                float row[Type::kPerVec];
                Type::unpack(data[i][v], row);
#pragma unroll
                for (uint32_t j = 0; j < Type::kPerVec; ++j) {
                    sum[v][j] += row[j];
                }
            }
            left.drop_first();
        }
    }
}

}  // namespace nccl_ep::ht_combine_impl
