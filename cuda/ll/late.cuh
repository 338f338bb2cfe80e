// Waits of warps for rows. They contain no function call: a wait that is given up only records what is late, and the
// report follows after the loops around it.
#pragma once

#include "protocol.cuh"

namespace nccl_ep {

// Why a warp has given up a wait, and for what it waited; reported once it has left the loops around its waits. A call
// within such a loop takes registers, and after it the compiler no longer knows the warp to be converged, which makes
// the code of each vote and shuffle in the loop several times as long.
struct LateWait {
    Awaited awaited;
    uint32_t fault;
    uint32_t got;
    uint64_t waited_ns;
};
template <typename Op>
__device__ __forceinline__ void report_late(const Op& op, const LateWait& late) {
    fail(op.common, late.fault, late.awaited, late.awaited.epoch, late.got, late.waited_ns);
}

// A warp waits for data of a rank that has begun the operation; another warp notices if it has not. All lanes call
// `has_come` together and get the same answer. If it gives up, it returns false and fills `late` except for `awaited`.
template <typename HasCome>
__device__ __forceinline__ bool wait_as_warp_in(const WaitParams& wait, LateWait& late, HasCome has_come) {
    uint64_t start = 0;
    uint32_t polls = 0;
#pragma unroll 1
    while (!has_come()) {
        spin_hint();
        if (++polls % kPollsPerCheck != 0) {
            continue;
        }
        // All lanes act on what lane 0 has seen.
        const uint64_t now = shuffle(globaltimer_ns(), 0);
        const uint32_t failed_rank = shuffle(ld_relaxed_sys(wait.peer_failed), 0);
        start = start == 0 ? now : start;
        if (failed_rank != 0 || now - start > wait.timeout_ns || any_lane(has_failed(wait))) {
            late.fault = failed_rank != 0 ? FAULT_PEER_FAILED : FAULT_TIMEOUT;
            late.got = failed_rank != 0 ? failed_rank - 1 : 0;
            late.waited_ns = now - start;
            return false;
        }
    }
    return true;
}

}  // namespace nccl_ep
