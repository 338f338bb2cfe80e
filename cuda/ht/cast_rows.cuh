// Rows that their sender casts to e4m3 (rows.cuh).
//
// One kernel casts from all types, as little of its code depends on the type. A chunk of the caller's row is loaded to
// the end of its part of the buffer and cast in place, from the last element to the first, so input and output end at
// the same byte. Behind it are the stamp and the scales of the whole row, which travel with the last chunk.
#pragma once

#include "../base/cast.cuh"
#include "scaled_rows.cuh"

namespace nccl_ep::ht_dispatch_impl {

struct CastRows : ScaledImage {
    // So that each row is cast only once.
    static constexpr bool kSenderStoresLocal = true;

    struct Prefetched {};
    template <typename Block>
    __device__ Prefetched prefetch(const Block&, uint32_t, typename Block::TokenLocation) const {
        return {};
    }

    __device__ uint32_t bytes_per_element() const {
        return scaled.cast_from == HT_CAST_F32 ? CastInput<F32>::kBytesPerElement
                                               : CastInput<Bf16>::kBytesPerElement;
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
    // A lane casts the elements of this many consecutive accesses together; each half of them has one scale.
    static constexpr uint32_t kVecs = 8;
    static constexpr uint32_t kHalf = kVecs / 2;

    __device__ __forceinline__ void begin_scales(uint8_t* behind) const {
        Vec16* vecs = reinterpret_cast<Vec16*>(behind);
#pragma unroll 1
        for (uint32_t i = lane_idx(); i <= scale_parts(); i += kWarpSize) {
            vecs[i] = i == 0 ? stamp() : Vec16{{0, 0, 0, 0}};
        }
    }
    // Casts the chunk that ends at `end`; its scales go behind `end`.
    template <typename Number>
    __device__ __forceinline__ void cast_chunk(uint8_t* end, uint32_t offset,
                                               uint32_t elements) const {
        constexpr uint32_t kOfWarp = kWarpSize * kVecs * Number::kPerVec;
        const uint8_t* in = end - elements * CastInput<Number>::kBytesPerElement;
#pragma unroll 1
        for (uint32_t left = (elements + kOfWarp - 1) / kOfWarp; left != 0; --left) {
            const uint32_t first = (left - 1) * kOfWarp + lane_idx() * (kVecs * Number::kPerVec);
            cast_stretch<Number>(in, end - elements, {first, elements, offset}, end + kStampBytes);
        }
    }
    // A lane's first element in a chunk; how many elements the chunk has; and how many of the row precede the chunk.
    struct Elements {
        uint32_t first;
        uint32_t of_chunk;
        uint32_t before;
    };
    // Casts consecutive elements, each lane its own; the last ones may be past the chunk. No later call reads what this
    // one writes. Lanes start with different accesses, to avoid bank conflicts.
    template <typename Number>
    __device__ __forceinline__ void cast_stretch(const uint8_t* in, uint8_t* out, const Elements& these,
                                                 uint8_t* scales) const {
        constexpr uint32_t kPerVec = Number::kPerVec;
        struct alignas(kPerVec) Packed {
            uint32_t word[kPerVec / 4];
        };
        const auto at = [&](uint32_t i) { return these.first + (i ^ lane_idx() % kVecs) * kPerVec; };
        Vec16 given[kVecs];
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            // Past the chunk its last access is read again, which changes the amax of no block.
            const uint32_t from = min(at(i), these.of_chunk - kPerVec);
            given[i] = *reinterpret_cast<const Vec16*>(in + from * CastInput<Number>::kBytesPerElement);
        }
        sync_warp();
        float most[2];
        find_amax<Number>(given, most);
        const BlockScale first(most[0], scaled.rows.form);
        const BlockScale second =
            scaled.rows.block > kHalf * kPerVec ? first : BlockScale(most[1], scaled.rows.form);
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            float elements[kPerVec];
            Number::unpack(given[i], elements);
            Packed packed;
#pragma unroll
            for (uint32_t j = 0; j < kPerVec; ++j) {
                elements[j] = __fmul_rn(elements[j], i < kHalf ? first.factor : second.factor);
            }
#pragma unroll
            for (uint32_t j = 0; j < kPerVec; j += 4) {
                packed.word[j / 4] = e4m3x4_from_f32(elements + j);
            }
            if (at(i) < these.of_chunk) {
                *reinterpret_cast<Packed*>(out + at(i)) = packed;
            }
        }
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t begin = these.first + (half * kHalf ^ (lane_idx() & kHalf)) * kPerVec;
            const uint32_t element = these.before + begin;
            if (begin < these.of_chunk && (element & (scaled.rows.block - 1)) == 0) {
                store_scale(scaled.rows, scales, element, half == 0 ? first.stored : second.stored);
            }
        }
    }
    // The amax of the blocks of both halves, at least min_amax().
    template <typename Number>
    __device__ __forceinline__ void find_amax(const Vec16 (&given)[kVecs], float (&most)[2]) const {
        constexpr uint32_t kOfLane = kVecs * Number::kPerVec;
        most[0] = Number::template amax_of<kHalf>(given, min_amax());
        most[1] = Number::template amax_of<kHalf>(given + kHalf, min_amax());
        if (scaled.rows.block > kOfLane / 2) {
            most[0] = larger(most[0], most[1]);
        }
        if (scaled.rows.block > kOfLane) {
#pragma unroll
            for (uint32_t lanes = 1; lanes * kOfLane < kMaxBlockLanes * kCastElements; lanes *= 2) {
                most[0] = larger(most[0], shuffle_xor(most[0], lanes));
            }
        }
    }
};

}  // namespace nccl_ep::ht_dispatch_impl
