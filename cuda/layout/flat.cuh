// The flat layout. Kernels are templates over their operation's `Layout`; the host's counterpart is in
// src/model/layout.rs.
#pragma once

#include "../base/primitive.cuh"

namespace nccl_ep {

// The output `[rows]`: one row for each token that names an expert of this rank, by ascending source rank, then token.
// So the rows of a source are contiguous, and over several nodes also those of each chunk of its tokens.
struct Flat {
    // Stores where the `count(source)` rows of each source begin; returns the number of all rows.
    template <typename Count>
    __device__ static uint32_t find_begins(uint32_t sources, Count count, uint32_t* begins) {
        uint32_t total = 0;
        for (uint32_t source = 0; source < sources; ++source) {
            begins[source] = total;
            total += count(source);
        }
        return total;
    }
    // The output row for row `index` of a source whose rows begin at `begin`.
    __device__ static uint32_t row(uint32_t begin, uint32_t index) { return begin + index; }
    // Output row `index` of those behind the `total` rows that tokens fill, which may lie past the last one: hence 64
    // bits.
    __device__ static uint64_t unused_row(uint32_t total, uint64_t index) { return total + index; }
};

}  // namespace nccl_ep
