// The one way to wait for another rank: with a deadline, and with a report of who did not come.
//
// Most waits are for a packet: 32 bits of data and the epoch of the operation in one 8-byte word. Warps
// also wait for rows, free places and what other warps of their block tell them. A wait that fails never
// traps: it says so, the kernel finishes its grid, the peers learn of it, and the host reads the report
// and answers later calls with ncclRemoteError.
//
// `Common` is what a kernel is told, or the part of it that has `peers` and `wait`.
#pragma once

#include "../params.h"
#include "ptx.cuh"

namespace nccl_ep {

// A clock read and a look at the failure mark cost more than a poll: one in this many turns.
constexpr uint32_t kPollsPerCheck = 64;

__device__ __forceinline__ uint64_t make_packet(uint32_t epoch, uint32_t data) {
    return uint64_t{epoch} << 32 | data;
}

__device__ __forceinline__ uint32_t packet_epoch(uint64_t packet) {
    return static_cast<uint32_t>(packet >> 32);
}

__device__ __forceinline__ uint32_t packet_data(uint64_t packet) {
    return static_cast<uint32_t>(packet);
}

// Whether a running number is `expected` or a later one, also across the wrap.
__device__ __forceinline__ bool is_or_follows(uint32_t number, uint32_t expected) {
    return static_cast<int32_t>(number - expected) >= 0;
}

// Who waits for what (WAIT_...) of whom, for the report.
struct Awaited {
    uint32_t what;
    uint32_t peer;
    uint32_t epoch;
};

// Describes the group's first failure, FAULT_..., and says whether this is it; later ones are
// consequences and stay silent.
__device__ inline bool report_failure(const WaitParams& wait, uint32_t fault,
                                      const Awaited& awaited, uint32_t expected, uint32_t got,
                                      uint64_t waited_ns = 0) {
    if (cas_relaxed_gpu(wait.failed, 0, 1) != 0) {
        return false;
    }
    wait.report->op = wait.op;
    wait.report->what = awaited.what;
    wait.report->peer = awaited.peer;
    wait.report->expected = expected;
    wait.report->got = got;
    wait.report->waited_ms = static_cast<uint32_t>(waited_ns / 1000000);
    st_release_sys(&wait.report->state, fault);
    return true;
}

// Tells every peer that this rank has failed, so that their waits end.
__device__ inline void tell_failure(const PeerTable& peers, const WaitParams& wait) {
    const uint8_t* own = peers.window[peers.rank];
    const uint64_t offset = reinterpret_cast<const uint8_t*>(wait.told) - own;
#pragma unroll 1  // this is part of every wait, and seldom done
    for (uint32_t peer = 0; peer < peers.ranks; ++peer) {
        if (peer != peers.rank) {
            st_release_sys(reinterpret_cast<uint32_t*>(peers.window[peer] + offset),
                           peers.rank + 1);
        }
    }
}

// Whether an operation of this rank has failed.
__device__ __forceinline__ bool has_failed(const WaitParams& wait) {
    return ld_relaxed_gpu(wait.failed) != 0;
}

// Whether a wait that began at `start` must end without success.
template <typename Common>
__device__ inline bool must_give_up(const Common& common, const Awaited& awaited, uint64_t start,
                                    uint32_t got) {
    const WaitParams& wait = common.wait;
    if (has_failed(wait)) {
        return true;
    }
    const uint64_t waited_ns = globaltimer_ns() - start;
    const uint32_t failed_rank = ld_relaxed_sys(wait.told);
    if (failed_rank != 0) {
        report_failure(wait, FAULT_PEER_FAILED, awaited, awaited.epoch, failed_rank - 1, waited_ns);
        return true;
    }
    if (waited_ns <= wait.timeout_ns) {
        return false;
    }
    // The peers of a self test stay in doubt: each says itself who did not answer.
    if (report_failure(wait, FAULT_TIMEOUT, awaited, awaited.epoch, got, waited_ns) &&
        wait.op != OP_PEER_SELFTEST) {
        tell_failure(common.peers, wait);
    }
    return true;
}

struct Arrival {
    bool ok;
    uint32_t data;
};

// Calls `load` until the packet that it gives has `come`, a predicate on the packet's epoch.
template <typename Common, typename Load, typename Come>
__device__ __forceinline__ Arrival wait_until(const Common& common, const Awaited& awaited,
                                              Load load, Come come) {
    uint64_t packet = load();
    if (come(packet_epoch(packet))) {
        return {true, packet_data(packet)};
    }
    const uint64_t start = globaltimer_ns();
    for (uint32_t polls = 1;; ++polls) {
        spin_hint();
        packet = load();
        if (come(packet_epoch(packet))) {
            return {true, packet_data(packet)};
        }
        if (polls % kPollsPerCheck == 0 &&
            must_give_up(common, awaited, start, packet_epoch(packet))) {
            return {false, 0};
        }
    }
}

// The packet's own data is all that is wanted. Equality is enough for what lies in a bank: a sender
// cannot write a later epoch into it before this one was consumed (see ll.cuh).
template <typename Common>
__device__ __forceinline__ Arrival wait_for_packet(const Common& common, const uint64_t* at,
                                                   const Awaited& awaited) {
    return wait_until(
        common, awaited, [at] { return ld_relaxed_sys(at); },
        [&](uint32_t epoch) { return epoch == awaited.epoch; });
}

// As wait_until, for a whole warp: all lanes call `has_come` together, and it tells all the same.
template <typename Common, typename HasCome>
__device__ __forceinline__ bool wait_as_warp(const Common& common, const Awaited& awaited,
                                             HasCome has_come) {
    if (has_come()) {
        return true;
    }
    const uint64_t start = globaltimer_ns();
    for (uint32_t polls = 1;; ++polls) {
        spin_hint();
        if (has_come()) {
            return true;
        }
        if (polls % kPollsPerCheck == 0 &&
            __ballot_sync(0xffffffffu, must_give_up(common, awaited, start, 0)) != 0) {
            return false;
        }
    }
}

// For what a peer overwrites without asking: the awaited epoch or a later one.
template <typename Common>
__device__ __forceinline__ Arrival wait_for_epoch_or_later(const Common& common,
                                                           const uint64_t* at,
                                                           const Awaited& awaited) {
    return wait_until(
        common, awaited, [at] { return ld_acquire_sys(at); },
        [&](uint32_t epoch) { return is_or_follows(epoch, awaited.epoch); });
}

// For a bare flag instead of a packet: true once `peer` has raised it to `expected` or later; then
// everything that it wrote before is visible to this thread.
template <typename Common>
__device__ inline bool wait_for_flag(const Common& common, const uint32_t* flag,
                                     const Awaited& awaited) {
    return wait_until(
               common, awaited, [flag] { return make_packet(ld_acquire_sys(flag), 0); },
               [&](uint32_t epoch) { return is_or_follows(epoch, awaited.epoch); })
        .ok;
}

}  // namespace nccl_ep
