// Writes or compares the header of a handle's block in a caller's memory. It is written after the kernel that fills the
// block, and compared before each LL combine, as the caller may have overwritten it; HT operations compare it
// themselves (ht/caller_block.cuh).
//
// Grid: one warp, one lane per word. If the header does not match, the group fails, and no later kernel uses the block.

#include "base/entry.cuh"
#include "base/warp.cuh"
#include "peer/fault.cuh"

namespace nccl_ep::handle_header_impl {

// After a failed operation the block is invalid: its header is zeros. If a peer has failed and no wait has met that,
// it is reported here, or the next operation would only find a block that is not its own.
__device__ void write(const HandleHeaderParams& params, uint32_t word) {
    const uint32_t failure = shuffle(known_failure(params.wait), 0);
    if (failure != 0 && failure != kOwnFailure && word == 0) {
        // Epoch 0, as nothing was waited for.
        report_failure(params.wait, FAULT_PEER_FAILED, {WAIT_COUNTS, failure - 1, 0}, {0}, {failure - 1});
    }
    if (word < HANDLE_HEADER_WORDS) {
        const bool is_rows = word == HANDLE_HEADER_ROWS && params.rows != nullptr;
        const uint32_t data = is_rows ? *params.rows : params.words[word];
        params.header[word] = failure == 0 ? data : 0;
    }
}

__device__ void compare(const HandleHeaderParams& params, uint32_t word) {
    const uint32_t expected = word < HANDLE_HEADER_COMPARED ? params.words[word] : 0;
    const uint32_t got = word < HANDLE_HEADER_COMPARED ? params.header[word] : 0;
    const LaneMask wrong = ballot(got != expected);
    if (wrong.any() && wrong.first() == lane_idx()) {
        report_failure(params.wait, FAULT_FOREIGN_STATE, {word, params.peers.rank, 0}, {expected},
                       {got});
        broadcast_failure(params.peers, params.wait);
    }
}

ENTRY(handle_header) {
    if (params.writes != 0) {
        write(params, lane_idx());
    } else {
        compare(params, lane_idx());
    }
}

}  // namespace nccl_ep::handle_header_impl
