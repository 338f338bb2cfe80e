// Loads and stores scales in the caller's memory, which may have any of the orders in docs/formats.md; in transit the
// scales of a row are dense.
//
// A lane moves 16 bytes of scales at a time: in one access where the caller's order and alignment allow it, else scale
// by scale.
#pragma once

#include "params/common.h"
#include "primitive.cuh"

namespace nccl_ep {

// Where the scales of a row begin.
__device__ __forceinline__ uint8_t* scales_of_row(const ScaledRows& rows, const ScaleView& view,
                                                  uint64_t expert, uint64_t row) {
    return view.data + (expert * view.expert + row * view.row) * rows.scale_width;
}

// The 16 bytes from byte `first` on, a multiple of 16, of a row's scales as they are in transit.
struct ScalePart {
    const ScaledRows& rows;
    const ScaleView& view;
    uint8_t* scales;  // of the row
    uint32_t first;

    // Whether load_vec and store_vec will do.
    __device__ bool is_vec_access() const { return is_dense() && is_aligned<Vec16>(); }
    __device__ __forceinline__ Vec16 load_vec() const {
        return ld_const(reinterpret_cast<const Vec16*>(scales + first));
    }
    // For any order; gives zeros past the last scale.
    __device__ __forceinline__ Vec16 load() const {
        return is_vec_access() ? load_vec() : load_elementwise_call(rows, view, scales, first);
    }

    __device__ __forceinline__ void store(const Vec16& part) const {
        if (is_vec_access()) {
            store_vec(part);
        } else {
            store_elementwise_call(rows, view, scales, first, part);
        }
    }

    // The next two are for parts that take more than one access.
    __device__ __forceinline__ Vec16 load_elementwise() const {
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
    __device__ __forceinline__ void store_vec(const Vec16& part) const {
        st_row(reinterpret_cast<Vec16*>(scales + first), part);
    }
    __device__ __forceinline__ void store_elementwise(const Vec16& part) const {
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
    // Not inlined, so that a kernel has this code only once.
    __device__ __noinline__ static Vec16 load_elementwise_call(const ScaledRows& rows, const ScaleView& view,
                                                               uint8_t* scales, uint32_t first) {
        return ScalePart{rows, view, scales, first}.load_elementwise();
    }
    __device__ __noinline__ static void store_elementwise_call(const ScaledRows& rows, const ScaleView& view,
                                                               uint8_t* scales, uint32_t first, const Vec16 part) {
        ScalePart{rows, view, scales, first}.store_elementwise(part);
    }
    // Whether the 16 bytes are contiguous, and all of them scales.
    __device__ bool is_dense() const {
        return view.column == 1 && first + sizeof(Vec16) <= rows.scale_bytes;
    }
    template <typename Access>
    __device__ bool is_aligned() const {
        return (static_cast<uint32_t>(reinterpret_cast<uint64_t>(scales)) + first) % sizeof(Access) == 0;
    }
    // How many scales there are from this part on; and scale `index` of them.
    template <typename Scale>
    __device__ uint32_t count() const {
        return (rows.scale_bytes - min(rows.scale_bytes, first)) / sizeof(Scale);
    }
    template <typename Scale>
    __device__ Scale* at(uint32_t index) const {
        const uint64_t column = first / sizeof(Scale) + index;
        return reinterpret_cast<Scale*>(scales) + column * view.column;
    }

    // Narrow scales that are strided or unaligned are rare, so this code is small rather than fast.
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
