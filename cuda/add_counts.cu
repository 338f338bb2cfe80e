// Adds the rows that a dispatch has delivered to each local expert to the group's running totals, behind the dispatch.
//
// Grid: one block. Dispatches on several streams may be counted at the same time, so the additions are atomic.

#include "base/entry.cuh"
#include "peer/fault.cuh"

namespace nccl_ep {

ENTRY(add_counts) {
    // After a failed dispatch the counts are meaningless.
    if (known_failure(params.wait) != 0) {
        return;
    }
    for (uint32_t expert = threadIdx.x; expert < params.experts; expert += blockDim.x) {
        // CUDA's 64-bit atomicAdd takes this type only.
        auto* const total = reinterpret_cast<unsigned long long*>(params.totals + expert);
        atomicAdd(total, static_cast<unsigned long long>(params.counts[expert]));
    }
}

}  // namespace nccl_ep
