// A handle's block in a caller's memory: what operations compare before they use it, as the caller may have overwritten
// it. What follows a valid header is trusted.
#pragma once

#include "params/ht.h"
#include "../peer/fault.cuh"

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

}  // namespace nccl_ep
