// CPU bodies for the functions of cuda/base/ptx.cuh, under the same names: the header that cuda/base/primitive.cuh
// includes in its place.
#pragma once

#include <chrono>

#include "cuda_cpu.h"

namespace nccl_ep {

struct alignas(16) Vec16 {
    uint32_t word[4];
};

inline void wait_for_grid() { simt::Block::Current().Follow(); }
inline void follow_grid() { wait_for_grid(); }

inline uint64_t globaltimer_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
}

}  // namespace nccl_ep

namespace simt {

// GPUs fault on such an access; x86 does not mind.
template <typename T>
void CheckAligned(const T* at) {
    if (reinterpret_cast<uintptr_t>(at) % sizeof(T) != 0) {
        Fail("an access of " + std::to_string(sizeof(T)) + " bytes is misaligned");
    }
}

template <typename T>
T LoadWord(const T* from) {
    CheckAligned(from);
    Block::Current().MustHaveFollowed();
    T value = __atomic_load_n(from, __ATOMIC_ACQUIRE);
    Block::Current().stores().Overlay(from, &value, sizeof(value));
    return value;
}

template <typename T>
void StoreWord(T* to, T value) {
    Block& block = Block::Current();
    block.MustHaveFollowed();
    block.stores().Put(block.thread(), to, &value, sizeof(value), sizeof(value), Landing::kSomeTime);
}

template <typename T>
void StoreAndRelease(T* to, T value) {
    CheckAligned(to);
    Block& block = Block::Current();
    block.stores().Release(block.thread());
    block.stores().LandAt(to);
    __atomic_store_n(to, value, __ATOMIC_RELEASE);
    block.MayLinger();
}

inline void StoreVec(nccl_ep::Vec16* to, const nccl_ep::Vec16& v, Landing landing) {
    Block& block = Block::Current();
    block.stores().Put(block.thread(), to, &v, sizeof(v), sizeof(v.word[0]), landing);
}

// Two words, each visible as a whole.
inline void StoreWords(uint64_t* to, const uint64_t (&words)[2]) {
    Block& block = Block::Current();
    block.stores().Put(block.thread(), to, words, sizeof(words), sizeof(words[0]), Landing::kSomeTime);
    block.MayLinger();
}

}  // namespace simt

namespace nccl_ep {

inline uint32_t ld_relaxed_gpu(const uint32_t* from) { return simt::LoadWord(from); }
inline uint32_t ld_relaxed_sys(const uint32_t* from) { return simt::LoadWord(from); }
inline uint64_t ld_relaxed_sys(const uint64_t* from) { return simt::LoadWord(from); }
// x86 gives every load this order; a missing acquire cannot be seen here.
inline uint32_t ld_acquire_sys(const uint32_t* from) { return simt::LoadWord(from); }
inline uint64_t ld_acquire_sys(const uint64_t* from) { return simt::LoadWord(from); }

inline void st_relaxed_gpu(uint32_t* to, uint32_t value) { simt::StoreWord(to, value); }
inline void st_relaxed_sys(uint32_t* to, uint32_t value) { simt::StoreWord(to, value); }
inline void st_relaxed_sys(uint64_t* to, uint64_t value) { simt::StoreWord(to, value); }
inline void st_relaxed_sys(uint64_t* to, uint64_t first, uint64_t second) {
    const uint64_t words[] = {first, second};
    simt::StoreWords(to, words);
}
inline void st_release_sys(uint32_t* to, uint32_t value) { simt::StoreAndRelease(to, value); }
inline void st_release_sys(uint64_t* to, uint64_t value) { simt::StoreAndRelease(to, value); }

inline uint32_t cas_relaxed_gpu(uint32_t* at, uint32_t expected, uint32_t desired) {
    return atomicCAS(at, expected, desired);
}

inline uint32_t inc_relaxed_gpu(uint32_t* at, uint32_t last) {
    return simt::Atomic(at, [last](uint32_t old) { return old >= last ? 0 : old + 1; });
}

inline uint32_t inc_acq_rel_gpu(uint32_t* at, uint32_t last) {
    simt::Block& block = simt::Block::Current();
    block.stores().Release(block.thread());
    return simt::Atomic(at, [last](uint32_t old) { return old >= last ? 0 : old + 1; });
}

inline Vec16 ld_relaxed_sys(const Vec16* from) {
    simt::CheckAligned(from);
    Vec16 v;
    for (int i = 0; i < 4; ++i) v.word[i] = __atomic_load_n(&from->word[i], __ATOMIC_RELAXED);
    simt::Block::Current().stores().Overlay(from, &v, sizeof(v));
    return v;
}

inline void st_relaxed_sys(Vec16* to, const Vec16& v) { simt::StoreVec(to, v, simt::Landing::kSomeTime); }

inline Vec16 ld_const(const Vec16* from) {
    simt::CheckAligned(from);
    return *from;
}

inline void st_row(Vec16* to, const Vec16& v) { simt::StoreVec(to, v, simt::Landing::kAtEnd); }

// What this thread announces afterwards, in whatever way, is announced by a release.
inline void fence_acq_rel_sys() {
    simt::Block& block = simt::Block::Current();
    block.stores().Release(block.thread());
    block.MayYield();
}

inline Vec16 ld_shared(const Vec16* from) {
    simt::CheckAligned(from);
    return *from;
}
inline uint32_t ld_acquire_cta_shared(const uint32_t* from) { return simt::LoadWord(from); }
inline uint32_t ld_relaxed_cta_shared(const uint32_t* from) { return simt::LoadWord(from); }

// To the block's own threads only: whoever of them makes a release then covers what came before.
inline void st_release_cta_shared(uint32_t* to, uint32_t value) {
    simt::CheckAligned(to);
    simt::Block& block = simt::Block::Current();
    block.stores().MeetBlock(block.thread());
    __atomic_store_n(to, value, __ATOMIC_RELEASE);
    block.MayYield();
}

inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
    simt::CheckAligned(barrier);
    simt::Block::Current().bulk().InitBarrier(barrier, arrivals);
}

inline bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity) {
    return simt::Block::Current().bulk().HasEnded(barrier, parity);
}

inline void async_load(Vec16* shared_to, const Vec16* from) {
    simt::Block& block = simt::Block::Current();
    block.bulk().LoadForThread(block.thread(), shared_to, from);
}

inline void async_load_commit() {
    simt::Block& block = simt::Block::Current();
    block.bulk().CommitLoads(block.thread());
}

template <uint32_t Groups>
inline void async_load_wait() {
    simt::Block& block = simt::Block::Current();
    block.bulk().WaitUntilLoaded(block.thread(), Groups);
}

// Without bulk copies kernels are as for chips before sm_90.
#ifndef SIMT_WITHOUT_BULK_COPY
#define NCCL_EP_HAS_BULK_COPY 1

inline void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    simt::Block& block = simt::Block::Current();
    block.stores().MeetBlock(block.thread());
    block.bulk().ArriveExpecting(barrier, bytes);
}

inline void bulk_load(void* shared_to, const void* from, uint32_t bytes, uint64_t* barrier) {
    simt::Block::Current().bulk().Load(shared_to, from, bytes, barrier);
}

inline void bulk_store(void* to, const void* shared_from, uint32_t bytes) {
    simt::Block& block = simt::Block::Current();
    block.bulk().Store(block.thread(), to, shared_from, bytes);
}

inline void bulk_store_commit() {
    simt::Block& block = simt::Block::Current();
    block.bulk().CommitStores(block.thread());
}

template <uint32_t Groups = 0>
inline void bulk_store_wait_read() {
    simt::Block& block = simt::Block::Current();
    block.bulk().WaitUntilRead(block.thread(), Groups);
}

template <uint32_t Groups>
inline void bulk_store_wait() {
    simt::Block& block = simt::Block::Current();
    block.bulk().WaitUntilWritten(block.thread(), Groups);
}

// A missing one cannot be noticed here.
inline void fence_shared_before_bulk() {}
inline void fence_global_before_bulk() {}
#endif


inline float f32_from_f16(uint16_t bits) { return static_cast<float>(simt::FromBits<_Float16>(bits)); }

inline uint16_t f16_from_f32(float value) { return static_cast<uint16_t>(simt::ToBits(static_cast<_Float16>(value))); }

// Rounds to nearest, ties to even.
inline uint32_t bf16_from_f32(float value) {
    constexpr uint32_t kNan = 0x7fff;
    const uint32_t wide = __float_as_uint(value);
    return std::isnan(value) ? kNan : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
}

inline uint32_t bf16x2_from_f32(float low, float high) { return bf16_from_f32(low) | bf16_from_f32(high) << 16; }

// Of a NaN and a number, the number.
template <typename Half>
uint32_t max_of_halves(uint32_t a, uint32_t b, Half as_float) {
    const auto larger = [&](uint16_t x, uint16_t y) {
        return std::isnan(as_float(x)) || as_float(x) < as_float(y) ? y : x;
    };
    const uint32_t low = larger(static_cast<uint16_t>(a), static_cast<uint16_t>(b));
    const uint32_t high = larger(static_cast<uint16_t>(a >> 16), static_cast<uint16_t>(b >> 16));
    return low | high << 16;
}

inline uint32_t max_bf16x2(uint32_t a, uint32_t b) {
    return max_of_halves(a, b, [](uint16_t x) { return __uint_as_float(uint32_t{x} << 16); });
}

inline uint32_t max_f16x2(uint32_t a, uint32_t b) {
    return max_of_halves(a, b, [](uint16_t x) { return f32_from_f16(x); });
}

inline void spin_hint() { simt::Block::Current().Poll(); }
inline void spin_gently() {}
inline void pause_cycles(uint32_t) {}
inline void shared_spin_hint() { simt::Block::Current().Poll(); }

// Rows of tests often look as if they had not come, and each poll lets a block's other threads run.
constexpr uint32_t kPollsOfChunk = 2;

}  // namespace nccl_ep
