// Adds a dispatch's received rows per local expert to the group's running totals; runs behind the dispatch.
//
// Grid: one block. It may run for dispatches on several streams at the same time, so the additions are atomic.

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
