// Rows with scales on the way, forwarded or cast (rows.cuh).
//
//   image      payload | stamp | scales, filled up with zeros to a multiple of 16 bytes
//
// The fingerprint that arrives with a row has no room for the scales, so the stamp has their word. Ranks whose
// fingerprints agree look for it at the same place.
#pragma once

#include "../base/cast.cuh"
#include "../base/scales.cuh"
#include "rows.cuh"

namespace nccl_ep::ht_dispatch_impl {

// Loops over scales are not unrolled: most rows take one turn, and the kernels have to stay in the instruction cache.
constexpr uint32_t kStampBytes = HT_STAMP_BYTES;

// What rows that are forwarded and rows that are cast have in common.
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

    // Of rows that need no ring: a part of the scales of a token, where it goes on this rank, and all of a row that
    // stays here.
    template <typename Block>
    __device__ Vec16 scale_part(const Block& block, uint32_t token, uint32_t part) const {
        return load_part(block, token, {}, part);
    }
    __device__ void store_scale_part(uint32_t row, uint32_t part, const Vec16& scales) const {
        part_of(scaled.rows.out, out_scales(row), part).store(scales);
    }
    template <typename Block>
    __device__ void keep_scales(const Block& block, uint32_t token, uint32_t row) const {
#pragma unroll 1
        for (uint32_t part = lane_idx(); part < scale_parts(); part += kWarpSize) {
            store_scale_part(row, part, load_part(block, token, {}, part));
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

// Rows that are rounded to e4m3. One kernel has the casts of all types, as little of it depends on them. A chunk of
// the caller's row is loaded to the end of its part of the buffer and cast there, from the last element to the
// first, so both end at the same byte. Behind it are the stamp and the scales of the whole row, which go with the
// last chunk.
struct CastRows : ScaledImage {
    // So each row is cast once.
    static constexpr bool kKeptBySender = true;
    static constexpr uint32_t kStep = kWarpSize * kCastElements;

    struct Ahead {};
    template <typename Block>
    __device__ Ahead look_ahead(const Block&, uint32_t, typename Block::Place) const {
        return {};
    }

    __device__ uint32_t bytes_per_element() const {
        return scaled.cast_from == HT_CAST_F32 ? Uncast<F32>::kBytesPerElement
                                               : Uncast<Bf16>::kBytesPerElement;
    }
    __device__ uint32_t behind_payload() const {
        return kStampBytes + scale_parts() * sizeof(Vec16);
    }
    __device__ uint32_t payload_end() const { return scaled.cast_chunk * bytes_per_element(); }
    __device__ uint32_t buffer_bytes(const HtCommon&) const {
        return payload_end() + behind_payload();
    }
    __device__ uint32_t span(const HtCommon&) const { return scaled.rows.payload_bytes; }
    __device__ uint32_t step(const HtCommon&) const { return scaled.cast_chunk; }
    __device__ uint32_t elements_at(uint32_t offset) const {
        return min(scaled.rows.payload_bytes - offset, scaled.cast_chunk);
    }
    __device__ uint32_t bytes_at(const HtCommon&, uint32_t offset) const {
        const uint32_t elements = elements_at(offset);
        const bool is_last = offset + elements == scaled.rows.payload_bytes;
        return elements + (is_last ? behind_payload() : 0);
    }
    template <typename Block>
    __device__ __forceinline__ void load(const Block&, const uint8_t* row, uint32_t offset,
                                         Staging& staging) const {
        const uint32_t bytes = elements_at(offset) * bytes_per_element();
        staging.load_to(staging.chunk() + payload_end() - bytes,
                        row + uint64_t{offset} * bytes_per_element(), bytes);
    }
    template <typename Block, typename Token>
    __device__ __forceinline__ const uint8_t* finish(const Block&, const Token&, uint32_t offset,
                                                     Staging& staging) const {
        const uint32_t elements = elements_at(offset);
        uint8_t* end = staging.chunk() + payload_end();
        if (offset == 0) {
            begin_scales(end);
        }
        staging.wait_loaded();
        if (scaled.cast_from == HT_CAST_BF16) {
            cast_chunk<Bf16>(end, offset, elements);
        } else if (scaled.cast_from == HT_CAST_F16) {
            cast_chunk<F16>(end, offset, elements);
        } else {
            cast_chunk<F32>(end, offset, elements);
        }
        staging.settle();
        return end - elements;
    }

   private:
    __device__ __forceinline__ void begin_scales(uint8_t* behind) const {
        Vec16* vecs = reinterpret_cast<Vec16*>(behind);
#pragma unroll 1
        for (uint32_t i = lane_idx(); i <= scale_parts(); i += kWarpSize) {
            vecs[i] = i == 0 ? stamp() : Vec16{{0, 0, 0, 0}};
        }
    }
    // Casts the elements that end at `end`; their scales go behind it. Several steps at once hide each other's
    // latency.
    template <typename Number>
    __device__ __forceinline__ void cast_chunk(uint8_t* end, uint32_t offset,
                                               uint32_t elements) const {
        constexpr uint32_t kSteps = 4 / Uncast<Number>::kVecs;
        const uint8_t* in = end - elements * Uncast<Number>::kBytesPerElement;
#pragma unroll 1
        for (uint32_t left = (elements + kSteps * kStep - 1) / (kSteps * kStep); left != 0; --left) {
            const uint32_t first = (left - 1) * kSteps * kStep;
            cast_steps<Number, kSteps>(in, end - elements, {first, elements, offset},
                                       end + kStampBytes);
        }
    }
    // Some elements of a chunk: the first of them, those of the chunk, and those of the row before the chunk.
    struct Elements {
        uint32_t first;
        uint32_t of_chunk;
        uint32_t before;
    };
    // Casts them, each lane its own. What is written no later call reads.
    template <typename Number, uint32_t kSteps>
    __device__ __forceinline__ void cast_steps(const uint8_t* in, uint8_t* out,
                                               const Elements& these, uint8_t* scales) const {
        using Given = Uncast<Number>;
        Given given[kSteps];
        float most[kSteps];
        const auto at = [&](uint32_t step) {
            return these.first + step * kStep + lane_idx() * kCastElements;
        };
#pragma unroll
        for (uint32_t step = 0; step < kSteps; ++step) {
            if (at(step) < these.of_chunk) {
                const auto* from =
                    reinterpret_cast<const Vec16*>(in + at(step) * Given::kBytesPerElement);
#pragma unroll
                for (uint32_t i = 0; i < Given::kVecs; ++i) {
                    given[step].vec[i] = from[i];
                }
            }
        }
        sync_warp();
#pragma unroll
        for (uint32_t step = 0; step < kSteps; ++step) {
            most[step] = given[step].largest_of_block(scaled.rows, at(step) < these.of_chunk);
        }
#pragma unroll
        for (uint32_t step = 0; step < kSteps; ++step) {
            Vec16 cast;
            const uint32_t stored = given[step].cast(scaled.rows, most[step], cast);
            if (at(step) < these.of_chunk) {
                *reinterpret_cast<Vec16*>(out + at(step)) = cast;
                const uint32_t element = these.before + at(step);
                if ((element & (scaled.rows.block - 1)) == 0) {
                    store_scale(scaled.rows, scales, element, stored);
                }
            }
        }
    }
};

}  // namespace nccl_ep::ht_dispatch_impl
