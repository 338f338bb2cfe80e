// High-throughput dispatch over several nodes: the rows of a pass that travel, one after the other for each other
// node, with their ids and weights. Where all tokens of this rank travel, nothing is packed: they are sent
// from where they lie.

#include "../base/row.cuh"
#include "../base/warp.cuh"
#include "../params/ht_nodes.h"

namespace nccl_ep::ht_pack_impl {

// One warp copies a token to row `to` of what travels.
__device__ void pack_token(const HtPackParams& params, uint32_t token, uint64_t to) {
    const Vec16* from =
        reinterpret_cast<const Vec16*>(params.tokens + uint64_t{token} * params.row_bytes);
    Vec16* out = reinterpret_cast<Vec16*>(params.out + to * params.row_bytes);
    for (uint32_t i = lane_idx(); i < params.row_bytes / sizeof(Vec16); i += kWarpSize) {
        out[i] = ld_const(from + i);
    }
    const uint32_t top_k = params.handle.top_k;
    if (params.topk_idx != nullptr && lane_idx() < top_k) {
        const uint64_t at = uint64_t{token} * top_k + lane_idx();
        params.out_idx[to * top_k + lane_idx()] = params.topk_idx[at];
        params.out_weights[to * top_k + lane_idx()] = params.weights[at];
    }
}

__device__ void run(const HtPackParams& params) {
    const uint32_t tokens = params.handle.tokens;
    for (uint32_t other = 0; other < params.others; ++other) {
        const uint32_t* departing = params.handle.departing + other * (params.chunks + 1);
        if (departing[params.chunks] == tokens) {
            continue;
        }
        const uint32_t first = departing[params.first_chunk];
        const uint32_t count = departing[params.end_chunk] - first;
        const uint32_t* list = params.handle.list + uint64_t{other} * tokens + first;
        for (uint32_t i = blockIdx.x * num_warps() + warp_idx(); i < count;
             i += gridDim.x * num_warps()) {
            pack_token(params, list[i], uint64_t{other} * params.room + i);
        }
    }
}

}  // namespace nccl_ep::ht_pack_impl

extern "C" __global__ void __launch_bounds__(nccl_ep::HT_PACK_THREADS)
    ht_pack(const __grid_constant__ nccl_ep::HtPackParams params) {
    nccl_ep::ht_pack_impl::run(params);
}
