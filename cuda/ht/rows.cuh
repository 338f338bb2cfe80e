// What the rows of a dispatch are on the way, and how they get there: the one place where kernels for rows with
// scales differ from those for rows without.
//
// What travels of a row is its *image*. A sender makes it in its staging buffer, chunk by chunk, each chunk at
// the same offset of the image as of the slot. A receiver loads it in chunks of its own size. `deliver` puts
// what belongs to the caller where it belongs, on either side.
//
// Kernels are templates over such a type. All lanes call its functions.
#pragma once

#include "staging.cuh"

namespace nccl_ep::ht_dispatch_impl {

// Rows without scales: the image is the row.
struct PlainRows {
    // Whether a sender also stores a row to this rank's output, if it goes there as well as to peers.
    static constexpr bool kKeptBySender = false;
    static constexpr bool kHasScales = false;
    // Whether rows lie by expert in the output.
    static constexpr bool kZones = false;

    // What a lane loads of a token well before it is needed.
    struct Ahead {};
    template <typename Block>
    __device__ Ahead look_ahead(const Block&, uint32_t, typename Block::Place) const {
        return {};
    }

    // Bytes from a row that is sent to the next.
    __device__ uint32_t token_bytes(const HtCommon& common) const { return common.shape.row_bytes; }

    __device__ uint32_t payload_bytes(const HtCommon& common) const {
        return common.shape.row_bytes;
    }
    // Bytes of a warp's staging buffer before the tails.
    __device__ uint32_t buffer_bytes(const HtCommon& common) const {
        return common.shape.chunk_bytes;
    }
    // Chunks are made for the offsets 0, step, 2 * step, ... below `span`.
    __device__ uint32_t span(const HtCommon& common) const { return common.shape.row_bytes; }
    __device__ uint32_t step(const HtCommon& common) const { return common.shape.chunk_bytes; }
    __device__ uint32_t bytes_at(const HtCommon& common, uint32_t offset) const {
        return row_format(common).chunk_at(offset);
    }
    // Begins to load what the chunk is made of; the staging buffer is reusable.
    template <typename Block>
    __device__ __forceinline__ void load(const Block& block, const uint8_t* row, uint32_t offset,
                                         Staging& staging) const {
        staging.load_to(staging.chunk(), row + offset,
                        row_format(block.common).chunk_at(offset));
    }
    // Makes the chunk, and returns where it is. `Token` has a token, its place, and what was loaded ahead.
    template <typename Block, typename Token>
    __device__ __forceinline__ const uint8_t* finish(const Block&, const Token&, uint32_t,
                                                     Staging& staging) const {
        staging.wait_loaded();
        return staging.chunk();
    }
    // Stores `bytes` of the image from `offset` on, in shared memory, to row `row` of the outputs; the caller
    // commits.
    template <typename Block>
    __device__ __forceinline__ void deliver(const Block& block, uint32_t row, uint32_t offset,
                                            uint32_t bytes, const uint8_t* chunk,
                                            Staging& staging) const {
        if (block.keeps_rows) {
            staging.store_shared(chunk, block.out_row(row) + offset, bytes);
        }
    }

    // Whether the chunk that has come is what this rank expects.
    template <typename Block>
    __device__ bool check(const Block&, uint32_t, uint32_t, uint32_t, const uint8_t*) const {
        return true;
    }
    __device__ uint32_t scales_word() const { return 0; }
    // Rows of the output for scales.
    __device__ uint32_t scale_rows() const { return 0xffffffffu; }
    // Writes zeros to the scales of a row; false if it has none.
    __device__ bool clear_scales(uint64_t) const { return false; }
};

}  // namespace nccl_ep::ht_dispatch_impl
