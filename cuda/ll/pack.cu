// What a dispatch sends to the ranks that carry this one on other nodes: a head, the rows and the ids, as one
// message. Each message costs the network its latency, and a copy of all rows costs less than one.

#include "nodes.cuh"

namespace nccl_ep::ll_pack_impl {

__device__ void run(const LlPackParams& params) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *reinterpret_cast<LlHello*>(params.message) = params.head;
    }
    uint8_t* body = body_of(params.message);
    const uint64_t first = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const uint64_t threads = uint64_t{gridDim.x} * blockDim.x;
    Vec16* rows = reinterpret_cast<Vec16*>(body);
#pragma unroll 4
    for (uint64_t i = first; i < params.row_bytes / sizeof(Vec16); i += threads) {
        rows[i] = ld_const(reinterpret_cast<const Vec16*>(params.rows) + i);
    }
    int64_t* ids = reinterpret_cast<int64_t*>(body + params.row_bytes);
    for (uint64_t i = first; i < params.num_ids; i += threads) {
        ids[i] = params.ids[i];
    }
}

}  // namespace nccl_ep::ll_pack_impl

extern "C" __global__ void __launch_bounds__(nccl_ep::LL_PACK_THREADS)
    ll_pack(const __grid_constant__ nccl_ep::LlPackParams params) {
    nccl_ep::ll_pack_impl::run(params);
}
