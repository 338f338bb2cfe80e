// Packs what a rank-major dispatch adds to the message of pack.cu: the weights, behind the ids.

#include "../base/entry.cuh"
#include "protocol.cuh"

namespace nccl_ep::ll_rank_pack_impl {

ENTRY(ll_rank_pack) {
    const uint64_t threads = uint64_t{gridDim.x} * blockDim.x;
#pragma unroll 1
    for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < params.num_weights; i += threads) {
        params.to[i] = params.weights[i];
    }
}

}  // namespace nccl_ep::ll_rank_pack_impl
