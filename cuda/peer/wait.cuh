// The one way to wait for another rank: with a deadline, and with a report of who did not come.
//
// Most waits are for a packet. Warps also wait for rows, for credits and for other warps of their block.
// A wait that fails never traps: it reports the failure, the kernel finishes its grid, the peers learn of
// it, and the host reads the report and answers later calls with ncclRemoteError.
//
// `Common` is the part of a kernel's parameters that has `peers` and `wait`.
#pragma once

#include "fault.cuh"
#include "packet.cuh"

namespace nccl_ep {

// A clock read and a look at the failure mark cost more than a poll: one in this many polls.
constexpr uint32_t kPollsPerCheck = 64;

// Whether a wait that began at `start` must end without success.
template <typename Common>
__device__ inline bool must_give_up(const Common& common, const Awaited& awaited, uint64_t start,
                                    uint32_t got) {
    const WaitParams& wait = common.wait;
    if (has_failed(wait)) {
        return true;
    }
    const uint64_t waited_ns = globaltimer_ns() - start;
    const uint32_t failed_rank = ld_relaxed_sys(wait.peer_failed);
    if (failed_rank != 0) {
        report_failure(wait, FAULT_PEER_FAILED, awaited, awaited.epoch, failed_rank - 1, waited_ns);
        return true;
    }
    if (waited_ns <= wait.timeout_ns) {
        return false;
    }
    // Not in a self test: there each rank reports by itself who did not answer.
    if (report_failure(wait, FAULT_TIMEOUT, awaited, awaited.epoch, got, waited_ns) &&
        wait.op != KERNEL_OP_PEER_SELFTEST) {
        broadcast_failure(common.peers, wait);
    }
    return true;
}

struct Arrival {
    bool ok;
    uint32_t data;
};

// Calls `load` until `has_arrived`, a predicate, holds for the epoch of the packet that it returns.
template <typename Common, typename Load, typename HasArrived>
__device__ __forceinline__ Arrival wait_until(const Common& common, const Awaited& awaited,
                                              Load load, HasArrived has_arrived) {
    uint64_t packet = load();
    if (has_arrived(packet_epoch(packet))) {
        return {true, packet_data(packet)};
    }
    const uint64_t start = globaltimer_ns();
    for (uint32_t polls = 1;; ++polls) {
        spin_hint();
        packet = load();
        if (has_arrived(packet_epoch(packet))) {
            return {true, packet_data(packet)};
        }
        if (polls % kPollsPerCheck == 0 &&
            must_give_up(common, awaited, start, packet_epoch(packet))) {
            return {false, 0};
        }
    }
}

// Waits for exactly this epoch: in a bank no later one can be there before this one was consumed. It orders
// nothing but the packet's own data.
template <typename Common>
__device__ __forceinline__ Arrival wait_for_packet(const Common& common, const uint64_t* at,
                                                   const Awaited& awaited) {
    return wait_until(
        common, awaited, [at] { return ld_relaxed_sys(at); },
        [&](uint32_t epoch) { return epoch == awaited.epoch; });
}

// As wait_until, for a whole warp: all lanes call `has_arrived` together and get the same answer.
template <typename Common, typename HasArrived>
__device__ __forceinline__ bool wait_as_warp(const Common& common, const Awaited& awaited,
                                             HasArrived has_arrived) {
    if (has_arrived()) {
        return true;
    }
    const uint64_t start = globaltimer_ns();
    for (uint32_t polls = 1;; ++polls) {
        spin_hint();
        if (has_arrived()) {
            return true;
        }
        if (polls % kPollsPerCheck == 0 &&
            ballot(must_give_up(common, awaited, start, 0)).any()) {
            return false;
        }
    }
}

// For a packet that the peer may overwrite at any time: the awaited epoch or a later one.
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
