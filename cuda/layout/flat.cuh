// The layout of rows without experts. Kernels are templates over their operation's `Layout`; its twin on the host is in
// src/model/layout.rs.
#pragma once

#include "../base/primitive.cuh"

namespace nccl_ep {

// The output `[rows]`: a row for each token that names an expert of this rank, by source rank ascending, then token.
// So rows of one source lie together; and over several nodes those of one part of its tokens do.
struct Flat {
    // Stores where the rows of each source begin, of which `count(source)` says how many there are; returns their sum.
    template <typename Count>
    __device__ static uint32_t find_begins(uint32_t sources, Count count, uint32_t* begins) {
        uint32_t total = 0;
        for (uint32_t source = 0; source < sources; ++source) {
            begins[source] = total;
            total += count(source);
        }
        return total;
    }
    // The row that is number `index` of those that begin at `begin`.
    __device__ static uint32_t row(uint32_t begin, uint32_t index) { return begin + index; }
    // The row that is number `index` of those that no token fills, if `total` are filled and there are so many. With
    // nearly 2^32 rows, 32 bits do not hold the numbers past the last one.
    __device__ static uint64_t unused_row(uint32_t total, uint64_t index) { return total + index; }
};

}  // namespace nccl_ep
