// Rows with scales (rows.cuh): what forwarded rows and cast rows (cast_rows.cuh) have in common, and the former.
//
//   image      payload | stamp | scales, filled up with zeros to a multiple of 16 bytes
//
// The fingerprint that arrives with a row has no room for the scales, so the stamp has their word. Ranks whose
// fingerprints agree look for it at the same place.
#pragma once

#include "../base/scales.cuh"
#include "rows.cuh"

namespace nccl_ep::ht_dispatch_impl {

// Loops over scales are not unrolled: most rows take one turn.
constexpr uint32_t kStampBytes = HT_STAMP_BYTES;

// What forwarded and cast rows have in common.
struct ScaledImage {
    static constexpr bool kHasScales = true;
    static constexpr bool kZones = false;
    const HtScaledRows& scaled;

    __device__ uint32_t payload_bytes(const HtCommon&) const { return scaled.rows.payload_bytes; }
    // 16-byte parts of the scales.
    __device__ uint32_t scale_parts() const {
        return (scaled.rows.scale_bytes + sizeof(Vec16) - 1) / sizeof(Vec16);
    }
    // Where in the image they begin.
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
        if (block.keeps_rows && offset < payload) {
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

// Rows whose scales the caller gives. The copy engine loads the payload, the lanes the rest.
struct ForwardedRows : ScaledImage {
    static constexpr bool kKeptBySender = false;

    // The lane's part of the scales, if it has one.
    struct Ahead {
        Vec16 scales;
    };
    template <typename Block>
    __device__ Ahead look_ahead(const Block& block, uint32_t token,
                                typename Block::Place place) const {
        if (token < block.common.handle.tokens && lane_idx() < scale_parts()) {
            return {load_part(block, token, place, lane_idx())};
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
                  part < kWarpSize ? token.ahead.scales
                                   : load_part(block, token.token, token.place, part));
        }
        settle_shared();
        staging.wait_loaded();
        return staging.chunk();
    }

    // For rows that need no ring: a part of a token's scales; where it goes on this rank; and a copy of all scales of a
    // row that stays here.
    template <typename Block>
    __device__ Vec16 scale_part(const Block& block, uint32_t token, uint32_t part) const {
        return load_part(block, token, {}, part);
    }
    __device__ ScalePart out_part(uint32_t row, uint32_t part) const {
        return part_of(scaled.rows.out, out_scales(row), part);
    }
    template <typename Block>
    __device__ void keep_scales(const Block& block, uint32_t token, uint32_t row) const {
#pragma unroll 1
        for (uint32_t part = lane_idx(); part < scale_parts(); part += kWarpSize) {
            out_part(row, part).store(load_part(block, token, {}, part));
        }
    }

   private:
    // A part of the scales of a token: in the caller's tensor, or behind a row that came from another node.
    template <typename Block>
    __device__ __forceinline__ Vec16 load_part(const Block& block, uint32_t token,
                                               typename Block::Place place,
                                               uint32_t number) const {
        const ScaleView& from = scaled.rows.from;
        if (from.data != nullptr) {
            return part_of(from, scales_of_row(scaled.rows, from, 0, token), number).load();
        }
        const uint8_t* row = block.row_of_token(token, place);
        return ld_const(reinterpret_cast<const Vec16*>(row + scaled.rows.payload_bytes) + number);
    }
};

}  // namespace nccl_ep::ht_dispatch_impl
