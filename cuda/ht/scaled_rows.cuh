// Rows with scales (rows.cuh): what forwarded and cast rows (cast_rows.cuh) have in common, and forwarded rows.
//
//   image      payload | stamp | scales, padded with zeros to a multiple of 16 bytes
//
// The stamp is the scales word, for which the fingerprint that arrives with a row has no room. Ranks whose fingerprints
// agree have it at the same offset.
#pragma once

#include "../base/scales.cuh"
#include "rows.cuh"

namespace nccl_ep::ht_dispatch_impl {

constexpr uint32_t kStampBytes = HT_STAMP_BYTES;

// What forwarded and cast rows have in common. Loops over scales are not unrolled, as most rows need one iteration.
struct ScaledImage {
    static constexpr bool kHasScales = true;
    static constexpr bool kZones = false;
    const HtScaledRows& scaled;

    __device__ uint32_t payload_bytes(const HtCommon&) const { return scaled.rows.payload_bytes; }
    // How many 16-byte parts the scales have.
    __device__ uint32_t scale_parts() const {
        return (scaled.rows.scale_bytes + sizeof(Vec16) - 1) / sizeof(Vec16);
    }
    // Where the scales begin in the image.
    __device__ uint32_t scales_at() const { return scaled.rows.payload_bytes + kStampBytes; }
    __device__ Vec16 stamp() const { return {{scaled.word, 0, 0, 0}}; }
    __device__ uint32_t scales_word() const { return scaled.word; }
    __device__ uint32_t scale_rows() const { return scaled.out_rows; }
    __device__ uint32_t token_bytes(const HtCommon&) const { return scaled.token_bytes; }
    // The scales of a row of the output.
    __device__ uint8_t* out_scales(uint32_t row) const {
        return scales_of_row(scaled.rows, scaled.rows.out, 0, row);
    }
    __device__ ScalePart part_of(const ScaleView& view, uint8_t* scales, uint32_t number) const {
        return {scaled.rows, view, scales, number * static_cast<uint32_t>(sizeof(Vec16))};
    }

    template <typename Block>
    __device__ __forceinline__ void deliver(const Block& block, uint32_t row, uint32_t offset,
                                            uint32_t bytes, const uint8_t* chunk,
                                            Staging& staging) const {
        const uint32_t payload = scaled.rows.payload_bytes;
        if (block.wants_rows && offset < payload) {
            staging.store_shared(chunk, block.out_row(row) + offset, min(bytes, payload - offset));
        }
        uint8_t* scales = out_scales(row);
#pragma unroll 1
        for (uint32_t part = lane_idx(); part < scale_parts(); part += kWarpSize) {
            const uint32_t at = scales_at() + part * sizeof(Vec16) - offset;
            if (at < bytes) {
                part_of(scaled.rows.out, scales, part)
                    .store(*reinterpret_cast<const Vec16*>(chunk + at));
            }
        }
        staging.settle();
    }

    template <typename Block>
    __device__ bool check(const Block& block, uint32_t source, uint32_t offset, uint32_t bytes,
                          const uint8_t* chunk) const {
        const uint32_t at = scaled.rows.payload_bytes - offset;
        if (at >= bytes) {
            return true;
        }
        const uint32_t word = *reinterpret_cast<const uint32_t*>(chunk + at);
        if (word == scaled.word) {
            return true;
        }
        if (lane_idx() == 0) {
            fail_for_scales(block.common, source, block.common.shape.fingerprint,
                            {scaled.word, word});
        }
        return false;
    }

    __device__ bool clear_scales(uint64_t number) const {
        if (number >= scaled.out_rows) {
            return false;
        }
        uint8_t* scales = out_scales(static_cast<uint32_t>(number));
#pragma unroll 1
        for (uint32_t part = lane_idx(); part < scale_parts(); part += kWarpSize) {
            part_of(scaled.rows.out, scales, part).store({{0, 0, 0, 0}});
        }
        return true;
    }
};

// Rows with the caller's scales. The copy engine loads the payload, the lanes load the scales.
struct ForwardedRows : ScaledImage {
    static constexpr bool kSenderStoresLocal = false;

    // This lane's part of the scales, if it has one.
    struct Prefetched {
        Vec16 scales;
    };
    template <typename Block>
    __device__ Prefetched prefetch(const Block& block, uint32_t token,
                                   typename Block::TokenLocation location) const {
        if (token < block.common.handle.tokens && lane_idx() < scale_parts()) {
            return {load_part(block, token, location, lane_idx())};
        }
        return {};
    }

    __device__ uint32_t buffer_bytes(const HtCommon& common) const {
        return common.shape.chunk_bytes;
    }
    __device__ uint32_t span(const HtCommon& common) const { return common.shape.row_bytes; }
    __device__ uint32_t step(const HtCommon& common) const { return common.shape.chunk_bytes; }
    __device__ uint32_t bytes_at(const HtCommon& common, uint32_t offset) const {
        return row_format(common).chunk_at(offset);
    }
    template <typename Block>
    __device__ __forceinline__ void load(const Block& block, const uint8_t* row, uint32_t offset,
                                         Staging& staging) const {
        const uint32_t payload = scaled.rows.payload_bytes;
        const uint32_t bytes =
            offset < payload ? min(payload - offset, bytes_at(block.common, offset)) : 0;
        staging.load_to(staging.chunk(), row + offset, bytes);
    }
    template <typename Block, typename Token>
    __device__ __forceinline__ const uint8_t* finish(const Block& block, const Token& token,
                                                     uint32_t offset, Staging& staging) const {
        const uint32_t bytes = bytes_at(block.common, offset);
        const auto write = [&](uint32_t at, const Vec16& vec) {
            if (at - offset < bytes) {
                *reinterpret_cast<Vec16*>(staging.chunk() + (at - offset)) = vec;
            }
        };
        if (lane_idx() == 0) {
            write(scaled.rows.payload_bytes, stamp());
        }
#pragma unroll 1
        for (uint32_t part = lane_idx(); part < scale_parts(); part += kWarpSize) {
            write(scales_at() + part * sizeof(Vec16),
                  part < kWarpSize ? token.prefetched.scales
                                   : load_part(block, token.token, token.location, part));
        }
        fence_for_bulk();
        staging.wait_loaded();
        return staging.chunk();
    }

    // For rows that need no ring (direct_rows.cuh): a part of a token's scales; the place of a part in this rank's
    // output; and a copy of all scales of a token that stays on this rank.
    template <typename Block>
    __device__ Vec16 scale_part(const Block& block, uint32_t token, uint32_t part) const {
        return load_part(block, token, {}, part);
    }
    __device__ ScalePart out_part(uint32_t row, uint32_t part) const {
        return part_of(scaled.rows.out, out_scales(row), part);
    }
    template <typename Block>
    __device__ void copy_local_scales(const Block& block, uint32_t token, uint32_t row) const {
#pragma unroll 1
        for (uint32_t part = lane_idx(); part < scale_parts(); part += kWarpSize) {
            out_part(row, part).store(load_part(block, token, {}, part));
        }
    }

   private:
    // A part of the scales of a token: in the caller's tensor, or behind a row that came from another node.
    template <typename Block>
    __device__ __forceinline__ Vec16 load_part(const Block& block, uint32_t token,
                                               typename Block::TokenLocation location,
                                               uint32_t number) const {
        const ScaleView& from = scaled.rows.from;
        if (from.data != nullptr) {
            return part_of(from, scales_of_row(scaled.rows, from, 0, token), number).load();
        }
        const uint8_t* row = block.row_of_token(token, location);
        return ld_const(reinterpret_cast<const Vec16*>(row + scaled.rows.payload_bytes) + number);
    }
};

}  // namespace nccl_ep::ht_dispatch_impl
