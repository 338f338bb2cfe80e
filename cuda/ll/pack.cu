// Packs what a dispatch sends to this rank's rail peers: a header, the rows and the ids, as one message, since a copy
// of all rows costs less than the latency of another message. Rows with scales are written in transit format, so over
// several nodes casts happen here.

#include "../base/entry.cuh"
#include "dispatch_rows.cuh"
#include "protocol.cuh"

namespace nccl_ep::ll_pack_impl {

template <typename Net>
__device__ void send(const LlPackParams& params) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        MessageHeader header = params.header;
        header.epoch = next_epoch(*params.channel_state);
        Net::send(params.message, header);
    }
}

__device__ void write_ids(const LlPackParams& params) {
    int64_t* ids = reinterpret_cast<int64_t*>(body_of(params.message) + params.row_bytes);
    const uint64_t threads = uint64_t{gridDim.x} * blockDim.x;
    for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < params.num_ids;
         i += threads) {
        ids[i] = params.ids[i];
    }
}

template <typename Net>
__device__ void run(const LlPackParams& params) {
    send<Net>(params);
    Vec16* rows = reinterpret_cast<Vec16*>(body_of(params.message));
    const uint64_t first = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const uint64_t threads = uint64_t{gridDim.x} * blockDim.x;
#pragma unroll 4
    for (uint64_t i = first; i < params.row_bytes / sizeof(Vec16); i += threads) {
        rows[i] = ld_const(reinterpret_cast<const Vec16*>(params.rows) + i);
    }
    write_ids(params);
}

// One warp per chunk of a row.
template <typename Net, typename Rows>
__device__ void run_scaled(const LlScaledPackParams& params) {
    const LlShape& shape = params.shape;
    const Rows rows{params.rows};
    send<Net>(params.pack);
    const uint32_t units = shape.tokens * shape.chunks;
    for (uint32_t unit = blockIdx.x * num_warps() + warp_idx(); unit < units;
         unit += gridDim.x * num_warps()) {
        const DivMod at = divide(unit, shape.chunks, shape.chunks_reciprocal);
        const uint32_t token = at.quotient;
        const ScaledChunk chunk = rows.chunk(shape, at.remainder);
        typename Rows::Fetched fetched;
        rows.fetch(shape, params.pack.rows, token, chunk, fetched);
        uint8_t* to = body_of(params.pack.message) + row_format(shape).offset(token);
        rows.write(fetched, chunk, to);
    }
    write_ids(params.pack);
}

ENTRY(ll_pack) { run<TwoSided>(params); }
ENTRY(ll_pack_scaled) { run_scaled<TwoSided, ForwardedRows<>>(params); }
ENTRY_BY_TYPE(ll_pack_cast, run_scaled<TwoSided, CastRows<T>>(params))

}  // namespace nccl_ep::ll_pack_impl
