// The rank-major layout: a token has one row on a rank, however many of the rank's experts it names. The host's
// counterpart is in src/model/layout.rs.
#pragma once

#include "../base/expert.cuh"

namespace nccl_ep {

// The output `[ranks][max_tokens]`: the rows of a source are contiguous, by token.
struct RankMajor {
    // Whether the caller of a combine has already summed a rank's rows of a token.
    static constexpr bool kCallerSums = true;

    const LlShape& shape;
    uint32_t ranks;

    __device__ uint32_t rows() const { return ranks * shape.max_tokens; }
    // The output row for row `index` from `source`, or kNowhere.
    __device__ int32_t row(uint32_t source, uint32_t index) const {
        return index < shape.max_tokens ? static_cast<int32_t>(source * shape.max_tokens + index) : kNowhere;
    }
    // The index of a row among those of its `source`.
    __device__ uint32_t ordinal(int32_t row, uint32_t source) const { return row - source * shape.max_tokens; }
};

}  // namespace nccl_ep
