// High-throughput operations over several nodes: what travels in front of a pass's rows. It says which operation they
// belong to, since messages of different ones may have the same sizes, and whether this rank knows of a failure:
// then sums that it should have made are not what it sends.

#include "../params/ht_nodes.h"
#include "../peer/fault.cuh"

namespace nccl_ep::ht_head_impl {

__device__ void run(const HtHeadParams& params) {
    if (threadIdx.x == 0) {
        *params.head = {params.shape_word, params.handle, known_failure(params.wait), 0};
    }
}

}  // namespace nccl_ep::ht_head_impl

extern "C" __global__ void __launch_bounds__(nccl_ep::HT_HEAD_THREADS)
    ht_head(const __grid_constant__ nccl_ep::HtHeadParams params) {
    nccl_ep::ht_head_impl::run(params);
}
