// What a row is, and division by a number that the launch knows, such as the chunks of a row.
#pragma once

#include "primitive.cuh"

namespace nccl_ep {

// A row as it travels: kernels ask this type for addresses and sizes instead of multiplying by a number of bytes.
// Which of its bytes are payload and which are scales is the affair of the kinds of rows (ll/dispatch_rows.cuh,
// ht/rows.cuh).
struct RowFormat {
    // A multiple of 16.
    uint32_t bytes;
    // A warp moves a row in chunks of that many bytes; the last one may be shorter.
    uint32_t chunk_bytes;

    // Where row number `index` of an array of rows begins.
    __device__ __forceinline__ uint64_t offset(uint64_t index) const { return index * bytes; }
    // 16-byte accesses of a row.
    __device__ __forceinline__ uint32_t vecs() const { return bytes / sizeof(Vec16); }
    // Bytes of the chunk that begins at `offset`.
    __device__ __forceinline__ uint32_t chunk_at(uint32_t offset) const {
        return min(bytes - offset, chunk_bytes);
    }
    __device__ __forceinline__ bool is_last_chunk(uint32_t offset) const {
        return bytes - offset <= chunk_bytes;
    }
};

// Divides by a product and one correction, in a quarter of the code of a division. `reciprocal` is 2^32 / by, rounded
// down (cuda/params/src/ll.rs), or one less.
struct Divided {
    uint32_t quotient;
    uint32_t remainder;
};

__device__ __forceinline__ Divided divide(uint32_t number, uint32_t by, uint32_t reciprocal) {
    // Too small by one at most.
    const uint32_t quotient = static_cast<uint32_t>(uint64_t{number} * reciprocal >> 32);
    const uint32_t remainder = number - quotient * by;
    return remainder < by ? Divided{quotient, remainder} : Divided{quotient + 1, remainder - by};
}

}  // namespace nccl_ep
