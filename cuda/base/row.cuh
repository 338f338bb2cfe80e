// The format of rows in transit, and fast division by a number that is known at launch.
#pragma once

#include "primitive.cuh"

namespace nccl_ep {

// Sizes and offsets of rows in transit. Which bytes of a row are payload and which are scales, the kinds of rows say
// (ll/dispatch_rows.cuh, ht/rows.cuh).
struct RowFormat {
    // A multiple of 16.
    uint32_t bytes;
    // A warp moves a row in chunks of this size; the last one may be shorter.
    uint32_t chunk_bytes;

    // Where row `index` begins in an array of rows.
    __device__ __forceinline__ uint64_t offset(uint64_t index) const { return index * bytes; }
    // Number of 16-byte accesses of a row.
    __device__ __forceinline__ uint32_t vecs() const { return bytes / sizeof(Vec16); }
    // Size of the chunk that begins at `offset`.
    __device__ __forceinline__ uint32_t chunk_at(uint32_t offset) const {
        return min(bytes - offset, chunk_bytes);
    }
    __device__ __forceinline__ bool is_last_chunk(uint32_t offset) const {
        return bytes - offset <= chunk_bytes;
    }
};

// Divides by multiplying and correcting once, with a quarter of the code of a division. `reciprocal` is 2^32 / by,
// rounded down (cuda/params/src/ll.rs), or one less.
struct DivMod {
    uint32_t quotient;
    uint32_t remainder;
};

__device__ __forceinline__ DivMod divide(uint32_t number, uint32_t by, uint32_t reciprocal) {
    // Too small by one at most.
    const uint32_t quotient = static_cast<uint32_t>(uint64_t{number} * reciprocal >> 32);
    const uint32_t remainder = number - quotient * by;
    return remainder < by ? DivMod{quotient, remainder} : DivMod{quotient + 1, remainder - by};
}

}  // namespace nccl_ep
