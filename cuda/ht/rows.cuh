// The kinds of rows of a dispatch: how a row is turned into what travels, and how it is delivered. Only here do kernels
// for rows with scales differ from those for rows without.
//
// The form of a row in transit is its *image*. A sender makes it in its staging buffer, chunk by chunk, each chunk at
// the same offset of the image as of the slot. A receiver loads it in chunks of its own size. `deliver` stores the
// parts of an image to the caller's outputs, on either side.
//
// Kernels are templates over such a type. All lanes call its functions.
#pragma once

#include "staging.cuh"

namespace nccl_ep::ht_dispatch_impl {

// Rows without scales: the image of a row is the row itself.
struct PlainRows {
    // Whether senders also store the rows that stay on this rank to its output.
    static constexpr bool kSenderStoresLocal = false;
    static constexpr bool kHasScales = false;
    // Whether output rows are ordered by expert.
    static constexpr bool kZones = false;

    // What a lane loads of a token in advance.
    struct Prefetched {};
    template <typename Block>
    __device__ Prefetched prefetch(const Block&, uint32_t, typename Block::TokenLocation) const {
        return {};
    }

    // The distance in bytes between the caller's rows.
    __device__ uint32_t token_bytes(const HtCommon& common) const { return common.shape.row_bytes; }

    __device__ uint32_t payload_bytes(const HtCommon& common) const {
        return common.shape.row_bytes;
    }
    // The bytes of a warp's staging buffer in front of the tails.
    __device__ uint32_t buffer_bytes(const HtCommon& common) const {
        return common.shape.chunk_bytes;
    }
    // Chunks are made for the offsets 0, step, 2 * step, ... below `span`.
    __device__ uint32_t span(const HtCommon& common) const { return common.shape.row_bytes; }
    __device__ uint32_t step(const HtCommon& common) const { return common.shape.chunk_bytes; }
    __device__ uint32_t bytes_at(const HtCommon& common, uint32_t offset) const {
        return row_format(common).chunk_at(offset);
    }
    // Starts to load what the chunk is made of into the staging buffer, which must be reusable.
    template <typename Block>
    __device__ __forceinline__ void load(const Block& block, const uint8_t* row, uint32_t offset,
                                         Staging& staging) const {
        staging.load_to(staging.chunk(), row + offset,
                        row_format(block.common).chunk_at(offset));
    }
    // Makes the chunk in shared memory, and returns where. `Token` has a token's number, location and prefetched data.
    template <typename Block, typename Token>
    __device__ __forceinline__ const uint8_t* finish(const Block&, const Token&, uint32_t,
                                                     Staging& staging) const {
        staging.wait_loaded();
        return staging.chunk();
    }
    // Stores `bytes` of the image from `offset` on, which are in shared memory at `chunk`, to row `row` of the outputs;
    // the caller commits.
    template <typename Block>
    __device__ __forceinline__ void deliver(const Block& block, uint32_t row, uint32_t offset,
                                            uint32_t bytes, const uint8_t* chunk,
                                            Staging& staging) const {
        if (block.wants_rows) {
            staging.store_shared(chunk, block.out_row(row) + offset, bytes);
        }
    }

    // Whether the chunk that has arrived is what this rank expects.
    template <typename Block>
    __device__ bool check(const Block&, uint32_t, uint32_t, uint32_t, const uint8_t*) const {
        return true;
    }
    __device__ uint32_t scales_word() const { return 0; }
    // How many rows the output for scales has.
    __device__ uint32_t scale_rows() const { return 0xffffffffu; }
    // Writes zeros to the scales of a row; false if it has none.
    __device__ bool clear_scales(uint64_t) const { return false; }
};

}  // namespace nccl_ep::ht_dispatch_impl
