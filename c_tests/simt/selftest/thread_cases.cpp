// Warp operations, barriers and atomics.
#include <atomic>

#include "../launch.h"
#include "../ptx_cpu.h"
#include "cases.h"

namespace simt_selftest {
namespace {

constexpr uint32_t kAll = 0xffffffffu;
constexpr uint32_t kThreads = 96;

// Runs `kernel` in one block; it returns whether its thread saw what it should.
template <typename Kernel>
bool AllThreads(uint64_t seed, uint32_t threads, Kernel kernel) {
    std::atomic<uint32_t> wrong{0};
    simt::Launch({1, threads, 0}, seed, [&] { wrong += kernel() ? 0 : 1; });
    return wrong == 0;
}

bool WarpOperations(uint64_t seed) {
    return AllThreads(seed, kThreads, [] {
        const uint32_t lane = threadIdx.x % 32;
        bool right = __shfl_sync(kAll, threadIdx.x, 5) == threadIdx.x - lane + 5;
        right &= __shfl_xor_sync(kAll, lane, 3) == (lane ^ 3);
        right &= __ballot_sync(kAll, lane < 4) == 0xf;
        right &= __match_any_sync(kAll, lane % 2) == (0x55555555u << lane % 2);
        right &= __any_sync(kAll, lane == 9) != 0 && __all_sync(kAll, lane < 31) == 0;
        return right;
    });
}

bool HalfWarpsOnTheirOwn(uint64_t seed) {
    return AllThreads(seed, 32, [] {
        const uint32_t lane = threadIdx.x;
        const uint32_t mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
        bool right = true;
        for (uint32_t turn = 0; turn < lane / 16 * 5 + 1; ++turn) right &= __ballot_sync(mask, true) == mask;
        return right;
    });
}

bool OthersGoOnWhenThreadsEnd(uint64_t seed) {
    return AllThreads(seed, kThreads, [] {
        if (threadIdx.x % 32 >= 20) return true;
        const bool right = __ballot_sync(kAll, true) == 0x000fffffu;
        return right && __syncthreads_count(1) == 60;
    });
}

bool Votes(uint64_t seed) {
    return AllThreads(seed, kThreads, [] {
        bool right = __syncthreads_count(threadIdx.x < 7) == 7;
        right &= __syncthreads_or(threadIdx.x == 95) == 1 && __syncthreads_or(0) == 0;
        right &= __syncthreads_and(threadIdx.x != 95) == 0 && __syncthreads_and(1) == 1;
        return right;
    });
}

// Two warps sum up, and read what the other one did, without a barrier between.
bool NoBarrier(uint64_t seed) {
    return AllThreads(seed, 64, [] {
        __shared__ uint32_t sums[2];
        if (threadIdx.x < 2) sums[threadIdx.x] = 0;
        __syncthreads();
        atomicAdd(&sums[threadIdx.x / 32], 1u);
        return sums[1 - threadIdx.x / 32] == 32;
    });
}

bool Atomics(uint64_t seed) {
    uint32_t sum = 0, most = 0, turns = 0;
    simt::Launch({4, 64, 0}, seed, [&] {
        atomicAdd(&sum, 2u);
        atomicMax(&most, blockIdx.x * blockDim.x + threadIdx.x);
        nccl_ep::inc_acq_rel_gpu(&turns, 9);
    });
    return sum == 2 * 256 && most == 255 && turns == 256 % 10;
}

bool BarrierThatOnlySomeReach(uint64_t seed) {
    return AllThreads(seed, 64, [] {
        if (threadIdx.x < 33) {
            __syncthreads();
        } else {
            __syncwarp();
        }
        return true;
    });
}

bool WaitThatNobodyEnds(uint64_t seed) {
    return AllThreads(seed, 64, [] {
        uint32_t flag = 0;
        while (nccl_ep::ld_relaxed_gpu(&flag) == 0) nccl_ep::spin_hint();
        return true;
    });
}

bool LanesInDifferentOperations(uint64_t seed) {
    return AllThreads(seed, 32, [] {
        if (threadIdx.x < 16) {
            __syncwarp();
        } else {
            __ballot_sync(kAll, true);
        }
        return true;
    });
}

bool MaskWithoutTheCaller(uint64_t seed) {
    return AllThreads(seed, 32, [] { return __ballot_sync(0xffffu, true) == 0xffffu; });
}

bool ShuffleFromOutsideTheMask(uint64_t seed) {
    return AllThreads(seed, 32, [] {
        if (threadIdx.x >= 16) return true;
        return __shfl_sync(0xffffu, threadIdx.x, 20) == 20;
    });
}

bool PartsOfWarps(uint64_t seed) {
    return AllThreads(seed, 33, [] { return true; });
}

bool MoreThanAStack(uint64_t seed) {
    return AllThreads(seed, 64, [] {
        volatile uint8_t large[128 << 10];
        for (uint32_t i = 0; i < sizeof(large); ++i) large[i] = 1;
        return __syncthreads_count(large[0] == 1) == 64;
    });
}

bool MoreThanAStackForAWhile(uint64_t seed) {
    return AllThreads(seed, 64, [] {
        // Only for the thread whose stack has none below it.
        const auto low = [] {
            volatile uint8_t large[101 << 10];
            for (uint32_t i = 0; i < sizeof(large); ++i) large[i] = 1;
            return large[0] == 1;
        };
        return __syncthreads_count(threadIdx.x != 0 || low()) == 64;
    });
}

}  // namespace

std::vector<Case> ThreadCases() {
    return {
        {"warp_operations", Wanted::kRight, WarpOperations},
        {"half_warps_on_their_own", Wanted::kRight, HalfWarpsOnTheirOwn},
        {"others_go_on_when_threads_end", Wanted::kRight, OthersGoOnWhenThreadsEnd},
        {"votes", Wanted::kRight, Votes},
        {"no_barrier", Wanted::kWrong, NoBarrier},
        {"atomics", Wanted::kRight, Atomics},
        {"barrier_that_only_some_reach", Wanted::kRefused, BarrierThatOnlySomeReach,
         "33 threads wait at __syncthreads (the first is 0), 31 threads wait at __syncwarp"},
        {"wait_that_nobody_ends", Wanted::kRefused, WaitThatNobodyEnds, "64 threads poll or run"},
        {"lanes_in_different_operations", Wanted::kRefused, LanesInDifferentOperations,
         "threads that must meet are in"},
        {"mask_without_the_caller", Wanted::kRefused, MaskWithoutTheCaller,
         "__ballot_sync with a mask that does not name the calling lane"},
        {"shuffle_from_outside_the_mask", Wanted::kRefused, ShuffleFromOutsideTheMask,
         "from a lane that the mask does not name"},
        {"parts_of_warps", Wanted::kRefused, PartsOfWarps, "a launch of 1 blocks of 33 threads"},
        {"more_than_a_stack", Wanted::kRefused, MoreThanAStack,
         "the thread has used more than the 102720 bytes of its stack"},
        {"more_than_a_stack_for_a_while", Wanted::kRefused, MoreThanAStackForAWhile,
         "the thread has used more than the 102720 bytes of its stack"},
    };
}

}  // namespace simt_selftest
