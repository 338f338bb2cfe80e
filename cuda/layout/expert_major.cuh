// The expert-major layout. Kernels are templates over their operation's `Layout`; the host's counterpart is in
// src/model/layout.rs.
#pragma once

#include "../base/expert.cuh"
#include "params/ll.h"

namespace nccl_ep {

// In place of a row: the expert's rows are full, and the group fails.
constexpr int32_t kDropped = -2;

// The output `[local_experts][ranks * max_tokens]`: the rows of an expert are contiguous, by ascending source rank,
// then token, then k.
struct ExpertMajor {
    // Whether the caller of a combine has already summed a rank's rows of a token.
    static constexpr bool kCallerSums = false;

    const LlShape& shape;
    uint32_t ranks;

    __device__ uint32_t rows_of_expert() const { return ranks * shape.max_tokens; }
    __device__ uint32_t rows() const { return shape.local_experts * ranks * shape.max_tokens; }

    // The index of (source, expert) in the table of counts, later of begins.
    __device__ uint32_t cell(uint32_t source, uint32_t expert) const {
        return source * shape.local_experts + expert;
    }
    // Replaces the rows that each source sends to `expert`, in `table`, by where they begin; returns their sum.
    __device__ uint32_t find_begins(uint32_t* table, uint32_t expert) const {
        uint32_t total = 0;
#pragma unroll 1
        for (uint32_t source = 0; source < ranks; ++source) {
            const uint32_t count = table[cell(source, expert)];
            table[cell(source, expert)] = total;
            total += count;
        }
        return total;
    }
    // How many of `total` rows for an expert there is room for.
    __device__ uint32_t kept(uint32_t total) const {
        const uint32_t most = rows_of_expert();
        return total < most ? total : most;
    }
    // After find_begins returned a `total` that there is no room for: the first source that sends an expert more rows
    // than it may have tokens. There is one, and its ids repeat the expert.
    struct Overflow {
        uint32_t source;
        uint32_t rows;
    };
    __device__ Overflow find_overflow(const uint32_t* table, uint32_t expert, uint32_t total) const {
        Overflow found = {0, 0};
#pragma unroll 1  // seldom done
        for (uint32_t source = ranks; source-- > 0;) {
            const uint32_t begin = table[cell(source, expert)];
            if (total - begin > shape.max_tokens) {
                found = {source, total - begin};
            }
            total = begin;
        }
        return found;
    }
    // The output row for row `index` from `source` to `expert`, or kDropped.
    __device__ int32_t row(const uint32_t* begins, uint32_t source, uint32_t expert, uint32_t index) const {
        return row_at(expert, begins[cell(source, expert)] + index);
    }
    // The output row for row `slot` of `expert`, or kDropped.
    __device__ int32_t row_at(uint32_t expert, uint32_t slot) const {
        const uint32_t most = rows_of_expert();
        return slot < most ? static_cast<int32_t>(expert * most + slot) : kDropped;
    }
    // The index of a row among those of its `expert`.
    __device__ uint32_t ordinal(int32_t row, uint32_t expert) const { return row - expert * rows_of_expert(); }
};

}  // namespace nccl_ep
