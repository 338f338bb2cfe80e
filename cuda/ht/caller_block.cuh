// A handle's block in a caller's memory: the last kernel that fills it writes its header, and operations compare that
// before they use the block, as the caller may have overwritten it. What follows a valid header is trusted.
#pragma once

#include "params/ht.h"
#include "../peer/handle_header.cuh"

namespace nccl_ep {

// Reports that the block is another's, by the first word of the header that differs.
__device__ __noinline__ static void fail_for_block(const HtCommon& common) {
    const CallerBlock& block = common.caller_block;
    uint32_t word = 0;
#pragma unroll 1  // seldom done
    while (word < HANDLE_HEADER_COMPARED && block.header[word] == block.words[word]) {
        ++word;
    }
    word = word < HANDLE_HEADER_COMPARED ? word : HANDLE_HEADER_HASH;
    report_failure(common.wait, FAULT_FOREIGN_STATE, {word, common.peers.rank, 0}, {block.words[word]},
                   {block.header[word]});
    broadcast_failure(common.peers, common.wait);
}

// What is known, as an operation on one node begins, of failures of the group; it fails here if the block is another's.
// One thread of each block calls it.
__device__ __forceinline__ uint32_t known_failure(const HtCommon& common) {
    const CallerBlock& block = common.caller_block;
    const uint32_t failure = known_failure(common.wait);
    if (block.header == nullptr) {  // the library's
        return failure;
    }
    if (ld_relaxed_gpu(block.header + HANDLE_HEADER_HASH) == block.words[HANDLE_HEADER_HASH]) {
        return failure;
    }
    fail_for_block(common);
    return kOwnFailure;
}

// The last block of the grid to end writes the header, with the number of rows at `rows`, if this kernel is the one to
// do that. All threads call it last.
__device__ inline void finish_block(const HtFinish& finish, const WaitParams& wait, const uint32_t* rows) {
    if (finish.block.header == nullptr) {
        return;
    }
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = inc_acq_rel_gpu(finish.ended, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (is_last && threadIdx.x < kWarpSize) {
        write_header(wait, finish.block, rows);
    }
}

}  // namespace nccl_ep
