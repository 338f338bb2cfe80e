// What a rank concludes from the verdicts of all ranks when a handle is routed.
#pragma once

#include "rings.cuh"

namespace nccl_ep {

constexpr uint32_t kAgreed = 0xffffffffu;

// Compares the verdict of `source` with this rank's, `own`. Returns kAgreed, or the mark that takes the place of the
// number of rows.
__device__ inline uint32_t conclude(uint32_t own, uint32_t source, const Arrival& verdict) {
    const uint32_t low = verdict.data & ((1u << HT_DISAGREED_RANK_SHIFT) - 1);
    const uint32_t why = HT_DISAGREED | source << HT_DISAGREED_RANK_SHIFT | low;
    if (!verdict.ok) {
        return HT_VERDICT_MISSING;
    }
    if (verdict.data >> HT_VERDICT_CODE_SHIFT != 0) {
        return why;
    }
    return verdict.data == own ? kAgreed : why | HT_DISAGREED_TOP_K;
}

}  // namespace nccl_ep
