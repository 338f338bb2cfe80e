// A chunk of a row with scales: a part of its payload, and the scales of that part.
//
// So a warp that casts needs no other warp for the scales, and a chunk arrives as a whole. In the row all scales follow
// the payload, which keeps the payload's parts aligned to whole lines of memory.
//
// Ranks with few tokens cut rows into chunks of one payload access, others into larger ones. So a chunk has a flag for
// each of its payload accesses, which stands for the scales of these elements, too.
#pragma once

#include "chunk.cuh"

namespace nccl_ep {

// One chunk: where it begins in the row on its way, and how many 16-byte accesses of payload and of scales it has.
struct ScaledChunk {
    uint32_t index;
    // Where its payload begins in the row, its scales begin among all scales, and all scales begin in the row.
    uint32_t payload_offset;
    uint32_t scale_offset;
    uint32_t payload_bytes;
    uint32_t payload_vecs;
    uint32_t scale_vecs;
    // The bit of the payload access whose elements the lane's first scales belong to.
    uint32_t access_of_scales = 1;

    __device__ ScaledChunk(const LlShape& shape, const ScaledRows& rows, uint32_t chunk_idx)
        : index(chunk_idx), payload_bytes(rows.payload_bytes) {
        const uint32_t padded = shape.row_bytes - rows.payload_bytes;
        payload_offset = min(index * shape.chunk_bytes, rows.payload_bytes);
        payload_vecs = min(rows.payload_bytes - payload_offset, shape.chunk_bytes) / sizeof(Vec16);
        scale_offset = min(index * rows.scale_chunk_bytes, padded);
        // The last chunk takes what is left.
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
    // Whether this lane has a part in the warp's access number `turn` of the payload, or of the scales.
    __device__ bool has_payload(uint32_t turn) const {
        return turn * kWarpSize + lane_idx() < payload_vecs;
    }
    __device__ bool has_scales(uint32_t turn) const {
        return turn * kWarpSize + lane_idx() < scale_vecs;
    }
    // Where the lane's part begins, in bytes from the beginning of the row's payload, or scales.
    __device__ uint32_t payload_byte(uint32_t turn) const {
        return payload_offset + (turn * kWarpSize + lane_idx()) * sizeof(Vec16);
    }
    __device__ uint32_t scale_byte(uint32_t turn) const {
        return scale_offset + (turn * kWarpSize + lane_idx()) * sizeof(Vec16);
    }
};

// This lane's part of a chunk, with the most accesses of payload and of scales that it has: casts make one of scales.
template <uint32_t kVecs, uint32_t kScaleVecs>
struct ScaledData {
    Vec16 payload[kVecs];
    Vec16 scales[kScaleVecs];

    // Calls `with` for each of the lane's accesses, and its number in the row on its way.
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
    // The same for the scales alone, with the number of the warp's access.
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
    // Bit i: whether some word of this lane's part for which flag number i stands is kSentinel.
    __device__ __forceinline__ uint32_t sentinels(const ScaledChunk& chunk) const {
        uint32_t bits = 0;
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            bits |= chunk.has_payload(i) && has_sentinel(payload[i]) ? 1u << i : 0;
        }
        // Rows with more scales have large chunks only.
        each_scales(*this, chunk, [&](const Vec16& vec, uint32_t turn) {
            bits |= !has_sentinel(vec) ? 0 : kVecs == 1 || turn != 0 ? 1 : chunk.access_of_scales;
        });
        return bits;
    }
    // The scales of an access whose number is not known at compile time.
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

// A chunk as it comes to a warp. A type apart from that of chunks with one flag: with one type for both, whose flags
// are bits, plain pairs of 32 tokens took 11.24 us instead of 11.08 (2 H200s).
template <uint32_t kVecs, uint32_t kScaleVecs>
struct Arriving<ScaledData<kVecs, kScaleVecs>> {
    using Data = ScaledData<kVecs, kScaleVecs>;
    Data data;
    // Bit i: flag number i of the chunk is there.
    uint32_t flagged = 0;
    Lookout lookout;

    // As of other chunks.
    template <typename Op>
    __device__ __forceinline__ bool poll(const Op& op, const BankRow<Own>& from, const ScaledChunk& chunk,
                                         bool gently) {
        if (lookout.asks_for_flags() && flagged != (1u << kVecs) - 1) {
            uint64_t* flags = from.flags + chunk.index * kVecs;
            flagged |= flagged_lanes(op, lane_idx() < kVecs ? flags + lane_idx() : nullptr).bits;
        }
        if (lookout.missing.has_this() && (lookout.looks(gently) || flagged != 0)) {
            load_arriving(data, from.data, chunk);
        }
        return lookout.note((data.sentinels(chunk) & ~flagged) != 0);
    }
};

}  // namespace nccl_ep
