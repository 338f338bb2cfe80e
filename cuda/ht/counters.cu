// What a routing tells its caller, in numbers as wide as the caller wants.
//
// Grid: one block, behind the kernel that routes. A handle on which the ranks do not agree has no rows.

#include "../base/entry.cuh"
#include "params/ht.h"

namespace nccl_ep::ht_counters_impl {

__device__ void store(const HtNumbers& numbers, uint32_t i, uint32_t value) {
    if (numbers.is_wide != 0) {
        static_cast<int64_t*>(numbers.data)[i] = value;
    } else {
        static_cast<int32_t*>(numbers.data)[i] = static_cast<int32_t>(value);
    }
}

ENTRY(ht_counters) {
    const uint32_t rows = *params.rows;
    if (threadIdx.x == 0 && params.total.data != nullptr) {
        store(params.total, 0, (rows & HT_DISAGREED) != 0 ? 0 : rows);
    }
    for (uint32_t i = threadIdx.x; params.experts.data != nullptr && i < params.local_experts; i += blockDim.x) {
        store(params.experts, i, params.counts[i]);
    }
}

}  // namespace nccl_ep::ht_counters_impl
