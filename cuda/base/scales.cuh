// The scales of rows in the caller's memory, in any of the orders that docs/formats.md lists.
//
// On the way the scales of a row are dense. A lane reads or writes 16 bytes of them at a time, scale by scale where
// the caller's order or alignment does not allow more.
#pragma once

#include "../params/common.h"
#include "ptx.cuh"

namespace nccl_ep {

// 16 bytes of the scales of a row, from byte `first` on, a multiple of 16.
struct ScalePart {
    const ScaleView& view;
    const ScaledRows& rows;
    uint64_t expert;
    uint64_t row;
    uint32_t first;

    __device__ uint8_t* at(uint32_t byte) const {
        const uint64_t column = (first + byte) / rows.scale_width;
        return view.data +
               (expert * view.expert + row * view.row + column * view.column) * rows.scale_width;
    }
    __device__ bool has(uint32_t byte) const { return first + byte < rows.scale_bytes; }
    // Whether the 16 bytes are scales, in accesses of `Unit`.
    template <typename Unit>
    __device__ bool is_dense() const {
        return view.column == 1 && first + sizeof(Vec16) <= rows.scale_bytes &&
               reinterpret_cast<uint64_t>(at(0)) % sizeof(Unit) == 0;
    }

    // Behind the last scale zeros.
    __device__ Vec16 load() const {
        if (is_dense<Vec16>()) {
            return ld_const(reinterpret_cast<const Vec16*>(at(0)));
        }
        switch (rows.scale_width) {
            case 4:
                return load_each<uint32_t>();
            case 2:
                return load_each<uint16_t>();
            default:
                return load_each<uint8_t>();
        }
    }

    __device__ void store(const Vec16& scales) const {
        if (is_dense<Vec16>()) {
            st_row(reinterpret_cast<Vec16*>(at(0)), scales);
        } else if (is_dense<uint32_t>()) {
            store_words(scales);
        } else if (rows.scale_width == 4) {
            store_each<uint32_t>(scales);
        } else if (rows.scale_width == 2) {
            store_each<uint16_t>(scales);
        } else {
            store_each<uint8_t>(scales);
        }
    }

   private:
    template <typename Scale>
    __device__ Vec16 load_each() const {
        Vec16 scales = {{0, 0, 0, 0}};
#pragma unroll
        for (uint32_t byte = 0; byte < sizeof(Vec16); byte += sizeof(Scale)) {
            if (has(byte)) {
                const uint32_t scale = *reinterpret_cast<const Scale*>(at(byte));
                scales.word[byte / 4] |= scale << byte % 4 * 8;
            }
        }
        return scales;
    }

    template <typename Scale>
    __device__ void store_each(const Vec16& scales) const {
#pragma unroll
        for (uint32_t byte = 0; byte < sizeof(Vec16); byte += sizeof(Scale)) {
            if (has(byte)) {
                *reinterpret_cast<Scale*>(at(byte)) =
                    static_cast<Scale>(scales.word[byte / 4] >> byte % 4 * 8);
            }
        }
    }

    // Narrow scales that lie together.
    __device__ void store_words(const Vec16& scales) const {
        uint32_t* to = reinterpret_cast<uint32_t*>(at(0));
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            to[i] = scales.word[i];
        }
    }
};

}  // namespace nccl_ep
