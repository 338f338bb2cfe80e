// What other blocks see of stores and when; shared memory; misaligned accesses; number formats.
#include <limits>

#include "../launch.h"
#include "../ptx_cpu.h"
#include "cases.h"

namespace simt_selftest {
namespace {

using nccl_ep::Vec16;

constexpr uint32_t kVecs = 64;

// What block 0 gives to block 1: words, and a flag that says that they are there. Block 0 stays
// until block 1 has read, since at its end everything lands.
struct Mailbox {
    Vec16 data[kVecs] = {};
    uint64_t flag = 0;
    uint64_t read = 0;
    uint32_t wrong = 0;
};

enum class Sender { kRight, kNoBarrier, kNoRelease };

void Await(const uint64_t* flag) {
    while (nccl_ep::ld_acquire_sys(flag) == 0) nccl_ep::spin_hint();
}

// All threads of block 1 call it.
void SayRead(Mailbox& box) {
    __syncthreads();
    if (threadIdx.x == 0) nccl_ep::st_release_sys(&box.read, uint64_t{1});
}

template <typename Store>
bool Deliver(uint64_t seed, Sender sender, Store store) {
    Mailbox box;
    simt::Launch({2, kVecs, 0}, seed, [&] {
        const uint32_t own = threadIdx.x;
        if (blockIdx.x == 0) {
            store(&box.data[own], Vec16{{own, own + 1, own + 2, own + 3}});
            if (sender != Sender::kNoBarrier) __syncthreads();
            if (own == 0 && sender == Sender::kNoRelease) {
                nccl_ep::st_relaxed_sys(&box.flag, 1);
            } else if (own == 0) {
                nccl_ep::st_release_sys(&box.flag, uint64_t{1});
            }
            Await(&box.read);
            return;
        }
        Await(&box.flag);
        const Vec16 got = nccl_ep::ld_relaxed_sys(&box.data[own]);
        for (uint32_t i = 0; i < 4; ++i) {
            if (got.word[i] != own + i) atomicAdd(&box.wrong, 1u);
        }
        SayRead(box);
    });
    return box.wrong == 0;
}

void StoreRow(Vec16* to, const Vec16& v) { nccl_ep::st_row(to, v); }
void StoreRelaxed(Vec16* to, const Vec16& v) { nccl_ep::st_relaxed_sys(to, v); }

// Polling for the data itself needs no flag, if every word is waited for.
bool WordsArriveOnTheirOwn(uint64_t seed) {
    Mailbox box;
    simt::Launch({2, kVecs, 0}, seed, [&] {
        if (blockIdx.x == 0) {
            StoreRelaxed(&box.data[threadIdx.x], {{1, 2, 3, 4}});
            return;
        }
        for (uint32_t i = 0; i < 4; ++i) {
            while (nccl_ep::ld_relaxed_sys(&box.data[threadIdx.x].word[i]) != i + 1) nccl_ep::spin_hint();
        }
    });
    return true;
}

// One word of the vector says nothing about the others.
bool OneWordForAll(uint64_t seed) {
    Mailbox box;
    simt::Launch({2, kVecs, 0}, seed, [&] {
        Vec16* at = &box.data[threadIdx.x];
        if (blockIdx.x == 0) {
            StoreRelaxed(at, {{1, 2, 3, 4}});
            Await(&box.read);
            return;
        }
        while (nccl_ep::ld_relaxed_sys(&at->word[3]) != 4) nccl_ep::spin_hint();
        if (nccl_ep::ld_relaxed_sys(at).word[0] != 1) atomicAdd(&box.wrong, 1u);
        SayRead(box);
    });
    return box.wrong == 0;
}

// A block sees its own stores, in their order, and so does everyone once it has ended.
bool OwnStores(uint64_t seed) {
    Vec16 data[kVecs] = {};
    uint32_t wrong = 0;
    simt::Launch({1, kVecs, 0}, seed, [&] {
        const uint32_t own = threadIdx.x;
        StoreRelaxed(&data[own], {{1, 1, 1, 1}});
        StoreRow(&data[own], {{own, 2, 3, 4}});
        __syncthreads();
        const uint32_t other = (own + 1) % kVecs;
        if (nccl_ep::ld_relaxed_sys(&data[other].word[0]) != other) atomicAdd(&wrong, 1u);
    });
    for (uint32_t i = 0; i < kVecs; ++i) wrong += data[i].word[0] != i || data[i].word[3] != 4;
    return wrong == 0;
}

bool DynamicShared(uint64_t seed) {
    uint32_t wrong = 0;
    simt::Launch({3, 64, 64 * sizeof(uint32_t)}, seed, [&] {
        DYNAMIC_SHARED(uint32_t, shared);
        shared[threadIdx.x] = threadIdx.x * 100 + blockIdx.x;
        __syncthreads();
        const uint32_t other = 63 - threadIdx.x;
        if (shared[other] != other * 100 + blockIdx.x) atomicAdd(&wrong, 1u);
    });
    return wrong == 0;
}

bool PastDynamicShared(uint64_t seed) {
    simt::Launch({1, 64, 32 * sizeof(uint32_t)}, seed, [] {
        DYNAMIC_SHARED(uint32_t, shared);
        shared[threadIdx.x] = 1;
    });
    return true;
}

bool Misaligned(uint64_t seed) {
    alignas(16) uint8_t bytes[32] = {};
    simt::Launch({1, 32, 0}, seed, [&bytes] { nccl_ep::ld_const(reinterpret_cast<const Vec16*>(bytes + 8)); });
    return true;
}

bool Numbers(uint64_t) {
    const float infinity = std::numeric_limits<float>::infinity();
    bool right = nccl_ep::bf16x2_from_f32(1.0f, -2.0f) == 0xc0003f80u;
    // Ties to even: 1 + 2^-8 is half way, 1 + 3 * 2^-8 too.
    right &= nccl_ep::bf16x2_from_f32(1.00390625f, 1.01171875f) == 0x3f823f80u;
    right &= nccl_ep::bf16x2_from_f32(infinity, 3.4e38f) == 0x7f807f80u;
    right &= nccl_ep::f16_from_f32(65520.0f) == 0x7c00 && nccl_ep::f16_from_f32(0.1f) == 0x2e66;
    right &= nccl_ep::f32_from_f16(0x0001) == 5.9604644775390625e-8f;
    return right && __fmaf_rn(1e8f, 1e8f, -1e16f) == std::fma(1e8f, 1e8f, -1e16f);
}

bool RowsDelivered(uint64_t seed) { return Deliver(seed, Sender::kRight, StoreRow); }
bool WordsDelivered(uint64_t seed) { return Deliver(seed, Sender::kRight, StoreRelaxed); }
bool NoBarrier(uint64_t seed) { return Deliver(seed, Sender::kNoBarrier, StoreRelaxed); }
bool NoBarrierRows(uint64_t seed) { return Deliver(seed, Sender::kNoBarrier, StoreRow); }
bool NoRelease(uint64_t seed) { return Deliver(seed, Sender::kNoRelease, StoreRelaxed); }
bool NoReleaseRows(uint64_t seed) { return Deliver(seed, Sender::kNoRelease, StoreRow); }

}  // namespace

std::vector<Case> MemoryCases() {
    return {
        {"rows_delivered", Wanted::kRight, RowsDelivered},
        {"words_delivered", Wanted::kRight, WordsDelivered},
        {"no_barrier_before_a_release", Wanted::kWrong, NoBarrier},
        {"no_barrier_before_a_release_rows", Wanted::kWrong, NoBarrierRows},
        {"relaxed_flag", Wanted::kWrong, NoRelease},
        {"relaxed_flag_rows", Wanted::kWrong, NoReleaseRows},
        {"words_arrive_on_their_own", Wanted::kRight, WordsArriveOnTheirOwn},
        {"one_word_for_all", Wanted::kWrong, OneWordForAll},
        {"own_stores", Wanted::kRight, OwnStores},
        {"dynamic_shared", Wanted::kRight, DynamicShared},
        {"past_dynamic_shared", Wanted::kFaults, PastDynamicShared},
        {"misaligned", Wanted::kRefused, Misaligned, "an access of 16 bytes is misaligned"},
        {"numbers", Wanted::kRight, Numbers},
    };
}

}  // namespace simt_selftest
