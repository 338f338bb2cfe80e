// The one way to wait for another rank: with a deadline, and with a report of who did not come.
//
// A wait that fails never traps. It returns false, the kernel finishes its grid, and the host reads
// the report and answers later calls with ncclRemoteError; the CUDA context stays usable.
#pragma once

#include "../params.h"
#include "ptx.cuh"

namespace nccl_ep {

// A clock read and a look at the group's failure mark cost more than a poll: one in this many turns.
constexpr uint32_t kPollsPerCheck = 64;

// Arrival is "this epoch or a later one", also across the wrap of the counter.
__device__ __forceinline__ bool epoch_reached(uint32_t got, uint32_t expected) {
    return static_cast<int32_t>(got - expected) >= 0;
}

// Describes the group's first failure; later ones are consequences and stay silent.
__device__ inline void report_timeout(const WaitParams& wait, uint32_t peer, uint32_t expected,
                                      uint32_t got) {
    if (cas_relaxed_gpu(wait.failed, 0, 1) != 0) {
        return;
    }
    wait.report->op = wait.op;
    wait.report->peer = peer;
    wait.report->expected = expected;
    wait.report->got = got;
    st_release_sys(&wait.report->state, FAULT_RECORDED);
}

// Waits until `peer` has raised `*flag` to epoch `expected`; true means that everything that it wrote
// before is visible to this thread. False: deadline passed, or another wait of the group failed.
__device__ inline bool wait_for_epoch(const WaitParams& wait, const uint32_t* flag,
                                      uint32_t expected, uint32_t peer) {
    uint32_t got = ld_acquire_sys(flag);
    if (epoch_reached(got, expected)) {
        return true;
    }
    const uint64_t start = globaltimer_ns();
    for (uint32_t polls = 1;; ++polls) {
        spin_hint();
        got = ld_acquire_sys(flag);
        if (epoch_reached(got, expected)) {
            return true;
        }
        if (polls % kPollsPerCheck != 0) {
            continue;
        }
        if (ld_relaxed_gpu(wait.failed) != 0) {
            return false;
        }
        if (globaltimer_ns() - start > wait.timeout_ns) {
            report_timeout(wait, peer, expected, got);
            return false;
        }
    }
}

}  // namespace nccl_ep
