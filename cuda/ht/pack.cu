// Packs the messages of a stage of a high-throughput dispatch over several nodes. Each other node gets the rows that
// travel there, with their ids and weights, and a header, as one message, since each message costs the network's
// latency. If all tokens of this rank travel, and copying their rows would cost more than another message, rows are
// sent in place and only the rest is packed. Rows with scales are always packed, in transit format: payload, then
// scales. So casts for other nodes happen here.

#include "../base/cast.cuh"
#include "../base/entry.cuh"
#include "../base/row.cuh"
#include "../base/scales.cuh"
#include "../base/warp.cuh"
#include "messages.cuh"

namespace nccl_ep::ht_pack_impl {

// Each kind of rows says how one warp writes a token's row in transit format.
struct PlainRows {
    __device__ __forceinline__ void pack(const HtPackParams& params, uint32_t token,
                                         uint8_t* to) const {
        copy(params, token, to, params.headers.messages.row_bytes);
    }
    __device__ __forceinline__ static void copy(const HtPackParams& params, uint32_t token,
                                                uint8_t* to, uint32_t row_bytes) {
        const Vec16* from =
            reinterpret_cast<const Vec16*>(params.tokens + uint64_t{token} * row_bytes);
        Vec16* out = reinterpret_cast<Vec16*>(to);
#pragma unroll 4
        for (uint32_t i = lane_idx(); i < row_bytes / sizeof(Vec16); i += kWarpSize) {
            out[i] = ld_const(from + i);
        }
    }
};

struct ForwardedRows {
    const ScaledRows& rows;

    __device__ __forceinline__ void pack(const HtPackParams& params, uint32_t token,
                                         uint8_t* to) const {
        PlainRows::copy(params, token, to, rows.payload_bytes);
        uint8_t* from = scales_of_row(rows, rows.from, 0, token);
        Vec16* scales = reinterpret_cast<Vec16*>(to + rows.payload_bytes);
        for (uint32_t i = lane_idx(); i * sizeof(Vec16) < rows.scale_bytes; i += kWarpSize) {
            const ScalePart part{rows, rows.from, from, i * static_cast<uint32_t>(sizeof(Vec16))};
            scales[i] = part.is_vec_access() ? part.load_vec() : part.load_elementwise();
        }
    }
};

template <typename Number>
struct CastRows {
    using Given = CastInput<Number>;
    const ScaledRows& rows;

    __device__ __forceinline__ void pack(const HtPackParams& params, uint32_t token,
                                         uint8_t* to) const {
        constexpr uint32_t kStep = kWarpSize * kCastElements;
        uint8_t* scales = to + rows.payload_bytes;
        for (uint32_t i = lane_idx(); i * sizeof(Vec16) < rows.scale_bytes; i += kWarpSize) {
            reinterpret_cast<Vec16*>(scales)[i] = {{0, 0, 0, 0}};
        }
        sync_warp();
        const uint8_t* from =
            params.tokens + uint64_t{token} * rows.payload_bytes * Given::kBytesPerElement;
        for (uint32_t first = 0; first < rows.payload_bytes; first += kStep) {
            const uint32_t at = first + lane_idx() * kCastElements;
            const bool is_there = at < rows.payload_bytes;
            Given given = {};
            if (is_there) {
                const Vec16* vecs = reinterpret_cast<const Vec16*>(
                    from + uint64_t{at} * Given::kBytesPerElement);
#pragma unroll
                for (uint32_t i = 0; i < Given::kVecs; ++i) {
                    given.vec[i] = ld_const(vecs + i);
                }
            }
            Vec16 cast;
            const float amax = given.block_amax(rows, is_there);
            const uint32_t stored = given.cast(rows, amax, cast);
            if (is_there) {
                *reinterpret_cast<Vec16*>(to + at) = cast;
            }
            if (is_there && (at & (rows.block - 1)) == 0) {
                store_scale(rows, scales, at, stored);
            }
        }
    }
};

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

template <typename Rows>
__device__ void pack_message(const HtPackParams& params, const Rows& rows, uint32_t other) {
    const HtMessages& messages = params.headers.messages;
    const uint32_t tokens = params.handle.tokens;
    const uint32_t* departing = params.handle.departing + other * (params.chunks + 1);
    const uint32_t first = departing[params.first_chunk];
    const uint32_t count = departing[params.end_chunk] - first;
    const bool with_rows = departing[params.chunks] != tokens ||
                           uint64_t{count} * messages.row_bytes <= params.packed_bytes;
    if (!with_rows && messages.tail_bytes == 0) {
        return;
    }
    const uint32_t* list = params.handle.departing_tokens + uint64_t{other} * tokens + first;
    for (uint32_t i = blockIdx.x * num_warps() + warp_idx(); i < count;
         i += gridDim.x * num_warps()) {
        const uint32_t token = list[i];
        if (with_rows) {
            rows.pack(params, token, row_of(messages, other, i));
        }
        if (messages.tail_bytes != 0) {
            pack_tail(params, token, tail_of(messages, other, i));
        }
    }
}

template <typename Net, typename Rows>
__device__ void run(const HtPackParams& params, const Rows& rows) {
    if (blockIdx.x == 0) {
        send_messages<Net>(params.headers);
    }
    for (uint32_t other = 0; other < params.headers.count; ++other) {
        pack_message(params, rows, other);
    }
}

template <typename Net, typename Rows>
__device__ void run(const HtScaledPackParams& params) {
    run<Net>(params.pack, Rows{params.rows});
}

ENTRY(ht_pack) { run<TwoSided>(params, PlainRows{}); }
ENTRY(ht_pack_scaled) { run<TwoSided, ForwardedRows>(params); }
ENTRY_BY_TYPE(ht_pack_cast, run<TwoSided, CastRows<T>>(params))

}  // namespace nccl_ep::ht_pack_impl
