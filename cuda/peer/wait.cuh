// Waits for other ranks, each with a deadline and a report that says who did not answer.
//
// Most waits are for a packet: 32 bits of data and 32 of epoch in one atomic word, so the data is its own flag and
// nothing has to be cleared between operations. Warps also wait for rows, for credits and for other warps of their
// block. A wait that fails never traps: it reports the failure, the kernel finishes its grid, the peers learn of it,
// and the host reads the report and answers later calls with ncclRemoteError.
//
// `Common` is the part of a kernel's parameters that has `peers` and `wait`.
#pragma once

#include "fault.cuh"

namespace nccl_ep {

__device__ __forceinline__ uint64_t make_packet(uint32_t epoch, uint32_t data) {
    return uint64_t{epoch} << 32 | data;
}

__device__ __forceinline__ uint32_t packet_epoch(uint64_t packet) {
    return static_cast<uint32_t>(packet >> 32);
}

__device__ __forceinline__ uint32_t packet_data(uint64_t packet) {
    return static_cast<uint32_t>(packet);
}

// The epoch after `epoch`. After the wrap it skips 0, which fresh memory holds, and 1, so that parities alternate.
__device__ __forceinline__ uint32_t epoch_after(uint32_t epoch) {
    return epoch == 0xffffffffu ? 2 : epoch + 1;
}

// Whether a sequence number is `expected` or a later one, also across the wrap.
__device__ __forceinline__ bool is_or_follows(uint32_t number, uint32_t expected) {
    return static_cast<int32_t>(number - expected) >= 0;
}

// The clock and the failure marks are checked once in so many polls, as a check costs more than a poll.
constexpr uint32_t kPollsPerCheck = 64;
// In place of the time at which a wait first read the clock: the wait has failed.
constexpr uint64_t kGivenUp = ~uint64_t{0};

// What a wait calls once in kPollsPerCheck polls: reports a timeout or a peer's failure. `start` is the time of the
// wait's first call, or 0 in that call; returns it, or kGivenUp. Not inlined: every wait has it and hardly any runs it.
template <typename Common>
__device__ __noinline__ uint64_t keep_waiting(const Common& common, const Awaited awaited, uint64_t start,
                                              uint32_t got) {
    const WaitParams& wait = common.wait;
    if (has_failed(wait)) {
        return kGivenUp;
    }
    const uint64_t now = globaltimer_ns();
    start = start == 0 ? now : start;
    const uint64_t waited_ns = now - start;
    const uint32_t failed_rank = ld_relaxed_sys(wait.peer_failed);
    if (failed_rank != 0) {
        report_failure(wait, FAULT_PEER_FAILED, awaited, {awaited.epoch}, {failed_rank - 1}, waited_ns);
        return kGivenUp;
    }
    if (waited_ns <= wait.timeout_ns) {
        return start;
    }
    // In a self-test each rank reports by itself who did not answer.
    if (report_failure(wait, FAULT_TIMEOUT, awaited, {awaited.epoch}, {got}, waited_ns) &&
        wait.op != KERNEL_OP_PEER_SELFTEST) {
        broadcast_failure(common.peers, wait);
    }
    return kGivenUp;
}

// Polls until `has_come()`; false once `keep_waiting(start)`, called once in kPollsPerCheck polls, has given up.
template <typename HasCome, typename KeepWaiting>
__device__ __forceinline__ bool poll_until(HasCome has_come, KeepWaiting keep_waiting) {
    uint64_t start = 0;
    uint32_t polls = 0;
#pragma unroll 1
    while (!has_come()) {
        spin_hint();
        if (++polls % kPollsPerCheck == 0) {
            start = keep_waiting(start);
            if (start == kGivenUp) {
                return false;
            }
        }
    }
    return true;
}

struct Arrival {
    bool ok;
    uint32_t data;
};

// Loads a packet with `load` until `has_arrived(epoch)` holds for its epoch.
template <typename Common, typename Load, typename HasArrived>
__device__ __forceinline__ Arrival wait_until(const Common& common, const Awaited& awaited,
                                              Load load, HasArrived has_arrived) {
    uint64_t packet;
    const bool ok = poll_until(
        [&] { return has_arrived(packet_epoch(packet = load())); },
        [&](uint64_t start) { return keep_waiting(common, awaited, start, packet_epoch(packet)); });
    return {ok, ok ? packet_data(packet) : 0};
}

// Waits for exactly this epoch: a bank cannot hold a later one before this one was consumed. Orders nothing but the
// packet's own data.
template <typename Common>
__device__ __forceinline__ Arrival wait_for_packet(const Common& common, const uint64_t* at,
                                                   const Awaited& awaited) {
    return wait_until(
        common, awaited, [at] { return ld_relaxed_sys(at); },
        [&](uint32_t epoch) { return epoch == awaited.epoch; });
}

// As wait_until, for a whole warp: all lanes call `has_arrived()` together and get the same answer.
template <typename Common, typename HasArrived>
__device__ __forceinline__ bool wait_as_warp(const Common& common, const Awaited& awaited,
                                             HasArrived has_arrived) {
    return poll_until(has_arrived, [&](uint64_t start) {
        start = keep_waiting(common, awaited, start, 0);
        return any_lane(start == kGivenUp) ? kGivenUp : start;
    });
}

// The deadline of a warp's polling loop. `is_over` only says that the loop must end, and `report` follows the loop:
// with a call in a loop, the compiler no longer knows the warp to be converged there (cuda/README.md).
class WaitLimit {
   public:
    // Called once for each poll, by all lanes together; all get the same answer.
    __device__ __forceinline__ bool is_over(const WaitParams& wait) {
        spin_hint();
        if (++polls_ % kPollsPerCheck != 0) {
            return false;
        }
        const uint64_t now = globaltimer_ns();
        start_ = start_ == 0 ? now : start_;
        return any_lane(has_failed(wait) || ld_relaxed_sys(wait.peer_failed) != 0 || now - start_ > wait.timeout_ns);
    }
    template <typename Common>
    __device__ __forceinline__ void report(const Common& common, const Awaited& awaited) const {
        keep_waiting(common, awaited, start_, 0);
    }

   private:
    uint64_t start_ = 0;
    uint32_t polls_ = 0;
};

// Waits for a bare flag instead of a packet: true once the peer has raised it to the awaited epoch or a later one; then
// everything that the peer wrote before is visible to this thread.
template <typename Common>
__device__ inline bool wait_for_flag(const Common& common, const uint32_t* flag,
                                     const Awaited& awaited) {
    return wait_until(
               common, awaited, [flag] { return make_packet(ld_acquire_sys(flag), 0); },
               [&](uint32_t epoch) { return is_or_follows(epoch, awaited.epoch); })
        .ok;
}

// Adds the nanoseconds since `start` to the time that this rank has waited for `rank`.
__device__ __forceinline__ void add_wait(uint64_t* waits, uint32_t rank, uint64_t start) {
    // CUDA's 64-bit atomicAdd takes this type only.
    atomicAdd(reinterpret_cast<unsigned long long*>(waits + rank),
              static_cast<unsigned long long>(globaltimer_ns() - start));
}

// A warp waits until `has_come(rank)` for all ranks with `is_awaited(rank)`, one rank per lane. All lanes poll in one
// loop: a lane that left a loop of its own might read the clock only once the last lane has left it, too.
template <typename IsAwaited, typename HasCome, typename KeepWaiting>
__device__ __forceinline__ void wait_for_ranks(uint32_t ranks, IsAwaited is_awaited, HasCome has_come,
                                               KeepWaiting keep_waiting) {
#pragma unroll 1
    for (uint32_t base = 0; base < ranks; base += kWarpSize) {
        const uint32_t rank = base + lane_idx();
        bool is_late = rank < ranks && is_awaited(rank);
        poll_until(
            [&] {
                is_late = is_late && !has_come(rank);
                return !any_lane(is_late);
            },
            [&](uint64_t start) {
                start = is_late ? keep_waiting(rank, start) : start;
                return any_lane(start == kGivenUp) ? kGivenUp : start;
            });
    }
}

}  // namespace nccl_ep
