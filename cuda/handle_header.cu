// Writes the header of a handle's block in a caller's memory after an LL dispatch, which fills it, or compares it
// before an LL combine, as the caller may have overwritten it. Kernels of HT do so themselves (ht/caller_block.cuh).
//
// Grid: one warp, one lane per word. If the header does not match, the group fails, and no later kernel uses the block.

#include "base/entry.cuh"
#include "base/warp.cuh"
#include "peer/handle_header.cuh"

namespace nccl_ep::handle_header_impl {

__device__ void compare(const HandleHeaderParams& params, uint32_t word) {
    const uint32_t expected = word < HANDLE_HEADER_COMPARED ? params.block.words[word] : 0;
    const uint32_t got = word < HANDLE_HEADER_COMPARED ? params.block.header[word] : 0;
    const LaneMask wrong = ballot(got != expected);
    if (wrong.any() && wrong.first() == lane_idx()) {
        report_failure(params.wait, FAULT_FOREIGN_STATE, {word, params.peers.rank, 0}, {expected},
                       {got});
        broadcast_failure(params.peers, params.wait);
    }
}

ENTRY(handle_header) {
    if (params.writes != 0) {
        write_header(params.wait, params.block, nullptr);
    } else {
        compare(params, lane_idx());
    }
}

}  // namespace nccl_ep::handle_header_impl
