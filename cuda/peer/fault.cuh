// Reports a failure of the group, once to the host and to every peer.
#pragma once

#include "peer.cuh"

namespace nccl_ep {

// What is awaited (WAIT_...), from which peer, for a report.
struct Awaited {
    uint32_t what;
    uint32_t peer;
    uint32_t epoch;
};

// What a report gives as expected, or as received instead: a word whose meaning depends on the fault and, if the word
// describes rows, the scales word of these rows.
struct ReportedValue {
    uint32_t word;
    uint32_t scales = 0;
};

// Reports FAULT_... to the host if it is the group's first failure, and returns whether it is; later failures are
// consequences and are not reported.
__device__ __forceinline__ bool report_failure_inline(const WaitParams& wait, uint32_t fault, const Awaited& awaited,
                                                      ReportedValue expected, ReportedValue got, uint64_t waited_ns) {
    if (cas_relaxed_gpu(wait.failed, 0, 1) != 0) {
        return false;
    }
    wait.report->op = wait.op;
    wait.report->what = awaited.what;
    wait.report->peer = awaited.peer;
    wait.report->expected = expected.word;
    wait.report->got = got.word;
    wait.report->waited_ms = static_cast<uint32_t>(waited_ns / 1000000);
    wait.report->expected_scales = expected.scales;
    wait.report->got_scales = got.scales;
    st_release_sys(&wait.report->state, fault);
    return true;
}

// Tells every peer that this rank has failed, so that their waits end.
__device__ __forceinline__ void broadcast_failure_inline(const PeerTable& peers, const WaitParams& wait) {
    const uint64_t offset =
        reinterpret_cast<const uint8_t*>(wait.peer_failed) - own_window(peers);
#pragma unroll 1  // seldom done
    for (uint32_t peer = 0; peer < peers.ranks; ++peer) {
        if (peer != peers.rank && is_active(peers, peer)) {
            signal(as<uint32_t>(window_of(peers, peer) + offset), peers.rank + 1);
        }
    }
}

// The two above as calls: nearly every function of a kernel can fail, and hardly any does.
__device__ __noinline__ static bool report_failure(const WaitParams& wait, uint32_t fault, const Awaited& awaited,
                                                   ReportedValue expected, ReportedValue got, uint64_t waited_ns = 0) {
    return report_failure_inline(wait, fault, awaited, expected, got, waited_ns);
}
__device__ __noinline__ static void broadcast_failure(const PeerTable& peers, const WaitParams& wait) {
    broadcast_failure_inline(peers, wait);
}

// Whether an operation of this rank has failed.
__device__ __forceinline__ bool has_failed(const WaitParams& wait) {
    return ld_relaxed_gpu(wait.failed) != 0;
}

constexpr uint32_t kOwnFailure = 0xffffffffu;

// Which failure of the group this thread knows of; other threads may learn of it earlier or later. 0 for none, else
// kOwnFailure or 1 + the peer that has reported its own failure.
__device__ __forceinline__ uint32_t known_failure(const WaitParams& wait) {
    const uint32_t own = ld_relaxed_gpu(wait.failed);
    const uint32_t peer = ld_relaxed_sys(wait.peer_failed);
    return own != 0 ? kOwnFailure : peer;
}

}  // namespace nccl_ep
