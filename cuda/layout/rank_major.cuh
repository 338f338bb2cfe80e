// The layout of rows by source rank: a token's row once, whatever number of the rank's experts it names. Its twin on
// the host is in src/model/layout.rs.
#pragma once

#include "../base/expert.cuh"

namespace nccl_ep {

// The output `[ranks][max_tokens]`: the rows of a source together, by token.
struct RankMajor {
    // Whether the caller of a combine has summed what a rank gives for a token.
    static constexpr bool kSummed = true;

    const LlShape& shape;
    uint32_t ranks;

    __device__ uint32_t rows() const { return ranks * shape.max_tokens; }
    // The row that is number `index` of those from `source`, or kNowhere.
    __device__ int32_t row(uint32_t source, uint32_t index) const {
        return index < shape.max_tokens ? static_cast<int32_t>(source * shape.max_tokens + index) : kNowhere;
    }
    // Which of the rows of its `source` a row is.
    __device__ uint32_t ordinal(int32_t row, uint32_t source) const { return row - source * shape.max_tokens; }
};

}  // namespace nccl_ep
