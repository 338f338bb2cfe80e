// How a block numbers tokens: each token gets its index in each *column* that it is in, which is a rank that tokens go
// to, or a list of tokens. The block goes through the tokens in tiles of one token per thread.
#pragma once

#include "../base/warp.cuh"
#include "params/ht_nodes.h"

namespace nccl_ep {

constexpr uint32_t kNumberingWarps = HT_ROUTE_THREADS / kWarpSize;
constexpr uint32_t kWordBits = 8 * sizeof(uint32_t);
// There is a column for each rank of a node, and one more.
constexpr uint32_t kColumnWords = MAX_PEERS / kWordBits + 1;
constexpr uint32_t kColumns = kColumnWords * kWordBits;

// The counts, in shared memory.
struct Numbering {
    // Tokens before the tile, by column.
    uint32_t before[kColumns];
    // Tokens before those of each warp in the tile.
    uint32_t of_warp[kNumberingWarps][kColumns];
};

// The columns that one thread's token is in.
struct ColumnMask {
    uint32_t word[kColumnWords];

    __device__ ColumnMask() {
#pragma unroll
        for (uint32_t w = 0; w < kColumnWords; ++w) {
            word[w] = 0;
        }
    }
    __device__ void set(uint32_t column) {
#pragma unroll
        for (uint32_t w = 0; w < kColumnWords; ++w) {
            word[w] |= column / kWordBits == w ? 1u << (column % kWordBits) : 0;
        }
    }
    __device__ bool has_any() const {
        uint32_t all = 0;
#pragma unroll
        for (uint32_t w = 0; w < kColumnWords; ++w) {
            all |= word[w];
        }
        return all != 0;
    }
};

// Calls `use(column, lanes)` for every column, with the lanes whose token is in it. Whole warps call it.
template <typename Use>
__device__ __forceinline__ void for_each_column(uint32_t columns, const ColumnMask& mask, Use use) {
#pragma unroll
    for (uint32_t w = 0; w < kColumnWords; ++w) {
#pragma unroll 1
        for (uint32_t bit = 0; bit < kWordBits && w * kWordBits + bit < columns; ++bit) {
            use(w * kWordBits + bit, ballot((mask.word[w] >> bit & 1) != 0));
        }
    }
}

// Resets the numbers. All threads call it; a barrier must follow.
__device__ inline void clear_numbering(Numbering& numbering) {
    for (uint32_t column = threadIdx.x; column < kColumns; column += HT_ROUTE_THREADS) {
        numbering.before[column] = 0;
    }
}

// Numbers a tile: calls `use(column, number)` for each column of this thread's token. All threads call it.
template <typename Use>
__device__ __forceinline__ void number_tile(Numbering& numbering, uint32_t columns,
                                            const ColumnMask& mask, Use use) {
    for_each_column(columns, mask, [&](uint32_t column, LaneMask lanes) {
        if (lane_idx() == column % kWarpSize) {
            numbering.of_warp[warp_idx()][column] = lanes.count();
        }
    });
    __syncthreads();
    for (uint32_t column = threadIdx.x; column < columns; column += HT_ROUTE_THREADS) {
        uint32_t before = numbering.before[column];
        for (uint32_t warp = 0; warp < kNumberingWarps; ++warp) {
            const uint32_t count = numbering.of_warp[warp][column];
            numbering.of_warp[warp][column] = before;
            before += count;
        }
        numbering.before[column] = before;
    }
    __syncthreads();
    for_each_column(columns, mask, [&](uint32_t column, LaneMask lanes) {
        if (lanes.has_this()) {
            use(column, numbering.of_warp[warp_idx()][column] + lanes.count_before());
        }
        sync_warp();
    });
    __syncthreads();
}

// The first token of chunk `chunk` of a source's `tokens`; for the chunk after the last one, the number of tokens.
__device__ __forceinline__ uint32_t chunk_begin(uint32_t tokens, uint32_t chunk, uint32_t chunks) {
    return static_cast<uint32_t>(uint64_t{tokens} * chunk / chunks);
}

// Whether a source sends all its tokens to a node because nearly all go there. Both sides compute the same.
__device__ __forceinline__ bool all_travel(uint32_t travelling, uint32_t tokens) {
    return uint64_t{travelling} * 32 >= uint64_t{tokens} * HT_WHOLE_OF_32;
}

}  // namespace nccl_ep
