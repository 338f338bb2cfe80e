// High-throughput dispatch over several nodes: the messages of a pass. Each other node gets the rows that travel
// there, with their ids and weights, behind a head, as one message, since each message costs the network its
// latency. Where all tokens of this rank travel, and rows are so many that copying them would cost more than a
// message, these are sent from where they lie; then only the rest is packed.

#include "../base/row.cuh"
#include "../base/warp.cuh"
#include "messages.cuh"

namespace nccl_ep::ht_pack_impl {

// One warp copies a token's row.
__device__ __forceinline__ void pack_row(const HtPackParams& params, uint32_t token, uint8_t* to) {
    const uint32_t row_bytes = params.heads.messages.row_bytes;
    const Vec16* from = reinterpret_cast<const Vec16*>(params.tokens + uint64_t{token} * row_bytes);
    Vec16* out = reinterpret_cast<Vec16*>(to);
#pragma unroll 4
    for (uint32_t i = lane_idx(); i < row_bytes / sizeof(Vec16); i += kWarpSize) {
        out[i] = ld_const(from + i);
    }
}

// One warp copies a token's ids and weights.
__device__ __forceinline__ void pack_tail(const HtPackParams& params, uint32_t token, uint8_t* to) {
    const uint32_t top_k = params.handle.top_k;
    if (lane_idx() < top_k) {
        const uint64_t at = uint64_t{token} * top_k + lane_idx();
        int64_t* ids = reinterpret_cast<int64_t*>(to);
        ids[lane_idx()] = params.topk_idx[at];
        reinterpret_cast<float*>(ids + top_k)[lane_idx()] = params.weights[at];
    }
}

__device__ void pack_message(const HtPackParams& params, uint32_t other) {
    const HtMessages& messages = params.heads.messages;
    const uint32_t tokens = params.handle.tokens;
    const uint32_t* departing = params.handle.departing + other * (params.chunks + 1);
    const uint32_t first = departing[params.first_chunk];
    const uint32_t count = departing[params.end_chunk] - first;
    const bool with_rows = departing[params.chunks] != tokens ||
                           uint64_t{count} * messages.row_bytes <= params.packed_bytes;
    if (!with_rows && messages.tail_bytes == 0) {
        return;
    }
    const uint32_t* list = params.handle.list + uint64_t{other} * tokens + first;
    for (uint32_t i = blockIdx.x * num_warps() + warp_idx(); i < count;
         i += gridDim.x * num_warps()) {
        const uint32_t token = list[i];
        if (with_rows) {
            pack_row(params, token, row_of(messages, other, i));
        }
        if (messages.tail_bytes != 0) {
            pack_tail(params, token, tail_of(messages, other, i));
        }
    }
}

__device__ void run(const HtPackParams& params) {
    if (blockIdx.x == 0) {
        write_heads(params.heads);
    }
    for (uint32_t other = 0; other < params.heads.count; ++other) {
        pack_message(params, other);
    }
}

}  // namespace nccl_ep::ht_pack_impl

extern "C" __global__ void __launch_bounds__(nccl_ep::HT_PACK_THREADS)
    ht_pack(const __grid_constant__ nccl_ep::HtPackParams params) {
    nccl_ep::ht_pack_impl::run(params);
}
