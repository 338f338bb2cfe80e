// Chunks of rows with scales: a part of the payload, and the scales of that part, so that a warp that casts needs no
// other warp for the scales. In the row all scales follow the payload, which keeps the payload's parts aligned to whole
// lines of memory.
//
// Ranks with few tokens cut rows into chunks of one payload access, others into larger ones. So that flags do not
// depend on the cut, a chunk has one for each of its payload accesses; it covers the scales of the access's elements,
// too.
#pragma once

#include "chunk.cuh"

namespace nccl_ep {

// One chunk: where it begins in the row in transit, and how many 16-byte accesses of payload and of scales it has.
struct ScaledChunk {
    uint32_t index;
    // The chunk's payload begins here in the row, its scales here among the row's scales, and these follow the payload.
    uint32_t payload_offset;
    uint32_t scale_offset;
    uint32_t payload_bytes;
    uint32_t payload_vecs;
    uint32_t scale_vecs;
    // The bit of the payload access to whose elements this lane's first scales belong.
    uint32_t access_of_scales = 1;

    __device__ ScaledChunk(const LlShape& shape, const ScaledRows& rows, uint32_t chunk_idx)
        : index(chunk_idx), payload_bytes(rows.payload_bytes) {
        const uint32_t padded = shape.row_bytes - rows.payload_bytes;
        payload_offset = min(index * shape.chunk_bytes, rows.payload_bytes);
        payload_vecs = min(rows.payload_bytes - payload_offset, shape.chunk_bytes) / sizeof(Vec16);
        scale_offset = min(index * rows.scale_chunk_bytes, padded);
        // The last chunk has all scales that are left.
        const uint32_t left = padded - scale_offset;
        const bool is_last = index + 1 == shape.chunks;
        scale_vecs = (is_last ? left : min(left, rows.scale_chunk_bytes)) / sizeof(Vec16);
        const uint32_t of_access = max(rows.scale_chunk_bytes / LL_SCALED_CHUNK_VECS, uint32_t{sizeof(Vec16)});
#pragma unroll
        for (uint32_t i = 1; i < LL_SCALED_CHUNK_VECS; ++i) {
            const bool is_later = lane_idx() * sizeof(Vec16) >= i * of_access && i * kWarpSize < payload_vecs;
            access_of_scales <<= is_later ? 1 : 0;
        }
    }
    // Whether this lane takes part in the warp's access number `turn` to the payload, or to the scales.
    __device__ bool has_payload(uint32_t turn) const {
        return turn * kWarpSize + lane_idx() < payload_vecs;
    }
    __device__ bool has_scales(uint32_t turn) const {
        return turn * kWarpSize + lane_idx() < scale_vecs;
    }
    // Where this lane's part of the access begins, in bytes from the beginning of the row's payload, or of its scales.
    __device__ uint32_t payload_byte(uint32_t turn) const {
        return payload_offset + (turn * kWarpSize + lane_idx()) * sizeof(Vec16);
    }
    __device__ uint32_t scale_byte(uint32_t turn) const {
        return scale_offset + (turn * kWarpSize + lane_idx()) * sizeof(Vec16);
    }
};

// This lane's part of a chunk. A lane has at most kVecs accesses to the payload and kScaleVecs to scales; casts need
// one to scales.
template <uint32_t kVecs, uint32_t kScaleVecs>
struct ScaledData {
    Vec16 payload[kVecs];
    Vec16 scales[kScaleVecs];

    // Calls `with(vec, index)` for each of the lane's accesses; `index` is the access's index in the row in transit.
    template <typename Self, typename With>
    __device__ __forceinline__ static void each(Self& self, const ScaledChunk& chunk, With with) {
        const uint32_t first = chunk.payload_offset / sizeof(Vec16) + lane_idx();
        const uint32_t first_scale =
            (chunk.payload_bytes + chunk.scale_offset) / sizeof(Vec16) + lane_idx();
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            if (chunk.has_payload(i)) {
                with(self.payload[i], first + i * kWarpSize);
            }
        }
        each_scales(self, chunk, [&](auto& vec, uint32_t turn) {
            with(vec, first_scale + turn * kWarpSize);
        });
    }
    // Calls `with(vec, turn)` for each of the lane's accesses to scales; `turn` is the number of the warp's access.
    template <typename Self, typename With>
    __device__ __forceinline__ static void each_scales(Self& self, const ScaledChunk& chunk,
                                                       With with) {
        if (chunk.has_scales(0)) {
            with(self.scales[0], 0);
        }
        if (kScaleVecs > 1 && chunk.scale_vecs > kWarpSize) {  // only in formats with as many scales as payload
#pragma unroll
            for (uint32_t i = 1; i < kScaleVecs; ++i) {
                if (chunk.has_scales(i)) {
                    with(self.scales[i], i);
                }
            }
        }
    }

    __device__ __forceinline__ void fill(uint32_t word) {
        const Vec16 vec = {{word, word, word, word}};
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            payload[i] = vec;
        }
#pragma unroll
        for (uint32_t i = 0; i < kScaleVecs; ++i) {
            scales[i] = vec;
        }
    }
    // Bit i: whether the part of this lane's data that flag i covers contains kSentinel.
    __device__ __forceinline__ uint32_t sentinels(const ScaledChunk& chunk) const {
        uint32_t bits = 0;
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            bits |= chunk.has_payload(i) && has_sentinel(payload[i]) ? 1u << i : 0;
        }
        // Only large chunks have more than one access to scales.
        each_scales(*this, chunk, [&](const Vec16& vec, uint32_t turn) {
            bits |= !has_sentinel(vec) ? 0 : kVecs == 1 || turn != 0 ? 1 : chunk.access_of_scales;
        });
        return bits;
    }
    // The scales of an access whose number is not known at compile time; an index would move the array to memory.
    __device__ __forceinline__ Vec16 scales_of(uint32_t turn) const {
        Vec16 vec = scales[0];
#pragma unroll
        for (uint32_t i = 1; i < kScaleVecs; ++i) {
            vec = turn == i ? scales[i] : vec;
        }
        return vec;
    }
    __device__ __forceinline__ void set_scales_of(uint32_t turn, const Vec16& vec) {
#pragma unroll
        for (uint32_t i = 0; i < kScaleVecs; ++i) {
            scales[i] = turn == i ? vec : scales[i];
        }
    }
};

// A chunk with scales for which a warp waits. With one type for all chunks, with flags as bits, dispatch and combine of
// 32 tokens without scales took 11.24 us instead of 11.08 (2 H200s).
template <uint32_t kVecs, uint32_t kScaleVecs>
struct Arriving<ScaledData<kVecs, kScaleVecs>> {
    using Data = ScaledData<kVecs, kScaleVecs>;
    Data data;
    // Bit i: flag i of the chunk has arrived.
    uint32_t flagged = 0;
    PollState polling;

    // Polls once; returns whether the chunk has arrived.
    template <typename Op>
    __device__ __forceinline__ bool poll(const Op& op, const BankRow<Own>& from, const ScaledChunk& chunk,
                                         bool gently) {
        if (polling.checks_flags() && flagged != (1u << kVecs) - 1) {
            uint64_t* flags = from.flags + chunk.index * kVecs;
            flagged |= flagged_lanes(op, lane_idx() < kVecs ? flags + lane_idx() : nullptr).bits;
        }
        if (polling.waiting.has_this() && (polling.lane_polls(gently) || flagged != 0)) {
            load_arriving(data, from.data, chunk);
        }
        return polling.update((data.sentinels(chunk) & ~flagged) != 0);
    }
};

}  // namespace nccl_ep
