// Writes the header of a handle's block in a caller's memory.
#pragma once

#include "fault.cuh"

namespace nccl_ep {

// A warp writes `words`, with the number of rows at `rows` unless that is NULL. After a failed operation the block is
// invalid: its header is zeros. If a peer has failed and no wait has met that, it is reported here, or the next
// operation would only find a block that is not its own.
__device__ inline void write_header(const WaitParams& wait, const CallerBlock& block, const uint32_t* rows) {
    const uint32_t word = lane_idx();
    const uint32_t failure = shuffle(known_failure(wait), 0);
    if (failure != 0 && failure != kOwnFailure && word == 0) {
        // Epoch 0, as nothing was waited for.
        report_failure(wait, FAULT_PEER_FAILED, {WAIT_COUNTS, failure - 1, 0}, {0}, {failure - 1});
    }
    if (word < HANDLE_HEADER_WORDS) {
        const bool is_rows = word == HANDLE_HEADER_ROWS && rows != nullptr;
        const uint32_t data = is_rows ? *rows : block.words[word];
        block.header[word] = failure == 0 ? data : 0;
    }
}

}  // namespace nccl_ep
