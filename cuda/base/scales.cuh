// The scales of rows in the caller's memory, in any of the orders that docs/formats.md lists.
//
// On the way the scales of a row are dense. A lane reads or writes 16 bytes of them at a time, scale by scale where
// the caller's order or alignment does not allow more.
#pragma once

#include "params/common.h"
#include "primitive.cuh"

namespace nccl_ep {

// Where the scales of a row begin.
__device__ __forceinline__ uint8_t* scales_of_row(const ScaledRows& rows, const ScaleView& view,
                                                  uint64_t expert, uint64_t row) {
    return view.data + (expert * view.expert + row * view.row) * rows.scale_width;
}

// 16 bytes of the scales of a row, from byte `first` on, a multiple of 16.
struct ScalePart {
    const ScaledRows& rows;
    const ScaleView& view;
    uint8_t* scales;  // of the row
    uint32_t first;

    // Whether load_at_once will do.
    __device__ bool is_one_access() const { return is_dense() && is_aligned<Vec16>(); }
    __device__ __forceinline__ Vec16 load_at_once() const {
        return ld_const(reinterpret_cast<const Vec16*>(scales + first));
    }
    // In any order; zeros past the last scale.
    __device__ __forceinline__ Vec16 load() const {
        return is_one_access() ? load_at_once() : load_apart(rows, view, scales, first);
    }

    __device__ __forceinline__ void store(const Vec16& part) const {
        if (is_one_access()) {
            store_at_once(part);
        } else {
            store_apart(rows, view, scales, first, part);
        }
    }

    // In any order but that of one access.
    __device__ __forceinline__ Vec16 load_slowly() const {
        if (rows.scale_width == 4) {
            Vec16 part;
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                part.word[i] = i < count<uint32_t>() ? *at<uint32_t>(i) : 0;
            }
            return part;
        }
        return rows.scale_width == 2 ? load_narrow<uint16_t>() : load_narrow<uint8_t>();
    }
    __device__ __forceinline__ void store_at_once(const Vec16& part) const {
        st_row(reinterpret_cast<Vec16*>(scales + first), part);
    }
    __device__ __forceinline__ void store_slowly(const Vec16& part) const {
        if (is_dense() && is_aligned<uint32_t>()) {
            uint32_t* to = reinterpret_cast<uint32_t*>(scales + first);
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                to[i] = part.word[i];
            }
        } else if (rows.scale_width == 4) {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                if (i < count<uint32_t>()) {
                    *at<uint32_t>(i) = part.word[i];
                }
            }
        } else if (rows.scale_width == 2) {
            store_narrow<uint16_t>(part);
        } else {
            store_narrow<uint8_t>(part);
        }
    }

   private:
    // Not inlined, so that a kernel has their code once.
    __device__ __noinline__ static Vec16 load_apart(const ScaledRows& rows, const ScaleView& view, uint8_t* scales,
                                                    uint32_t first) {
        return ScalePart{rows, view, scales, first}.load_slowly();
    }
    __device__ __noinline__ static void store_apart(const ScaledRows& rows, const ScaleView& view, uint8_t* scales,
                                                    uint32_t first, const Vec16 part) {
        ScalePart{rows, view, scales, first}.store_slowly(part);
    }
    // Whether the 16 bytes lie together, and are all scales.
    __device__ bool is_dense() const {
        return view.column == 1 && first + sizeof(Vec16) <= rows.scale_bytes;
    }
    template <typename Access>
    __device__ bool is_aligned() const {
        return (static_cast<uint32_t>(reinterpret_cast<uint64_t>(scales)) + first) % sizeof(Access) == 0;
    }
    // The number of scales from this part on, and one of them.
    template <typename Scale>
    __device__ uint32_t count() const {
        return (rows.scale_bytes - min(rows.scale_bytes, first)) / sizeof(Scale);
    }
    template <typename Scale>
    __device__ Scale* at(uint32_t index) const {
        const uint64_t column = first / sizeof(Scale) + index;
        return reinterpret_cast<Scale*>(scales) + column * view.column;
    }

    // Narrow scales that lie apart, or unaligned: rare, so their code is small rather than fast.
    template <typename Scale>
    __device__ Vec16 load_narrow() const {
        Vec16 part = {{0, 0, 0, 0}};
        const uint32_t scales_here = min(count<Scale>(), kPerPart<Scale>);
#pragma unroll 1
        for (uint32_t i = 0; i < scales_here; ++i) {
            const uint32_t bits = uint32_t{*at<Scale>(i)} << shift<Scale>(i);
#pragma unroll
            for (uint32_t word = 0; word < 4; ++word) {
                part.word[word] |= word == i / kPerWord<Scale> ? bits : 0;
            }
        }
        return part;
    }

    template <typename Scale>
    __device__ void store_narrow(const Vec16& part) const {
        const uint32_t scales_here = min(count<Scale>(), kPerPart<Scale>);
#pragma unroll 1
        for (uint32_t i = 0; i < scales_here; ++i) {
            const uint32_t word = i / kPerWord<Scale>;
            const uint32_t low = word == 0 ? part.word[0] : part.word[1];
            const uint32_t high = word == 2 ? part.word[2] : part.word[3];
            *at<Scale>(i) = static_cast<Scale>((word < 2 ? low : high) >> shift<Scale>(i));
        }
    }

    template <typename Scale>
    static constexpr uint32_t kPerPart = sizeof(Vec16) / sizeof(Scale);
    template <typename Scale>
    static constexpr uint32_t kPerWord = sizeof(uint32_t) / sizeof(Scale);
    // Bit position of a scale in its word.
    template <typename Scale>
    __device__ static uint32_t shift(uint32_t index) {
        return index % kPerWord<Scale> * (8 * sizeof(Scale));
    }
};

}  // namespace nccl_ep
