// All inline PTX of the project. Names give memory order and scope: "sys" reaches other GPUs and the host, "gpu" this
// GPU alone, "cta" this block.
//
// Kernels contain no asm, so everything that they assume about the machine can be read here.
#pragma once

#include <cstdint>

// The block's dynamic shared memory.
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(128) type name[]

namespace nccl_ep {

// The unit of all bulk traffic: one 16-byte access.
struct alignas(16) Vec16 {
    uint32_t word[4];
};

// First statement of a kernel that may be launched while the kernel before it runs (programmatic dependent launch):
// waits until that one has ended and its stores are visible.
__device__ __forceinline__ void wait_for_grid() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// As wait_for_grid, and lets the next kernel be launched from here on.
__device__ __forceinline__ void follow_grid() {
    wait_for_grid();
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}

__device__ __forceinline__ uint64_t globaltimer_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ uint32_t ld_relaxed_gpu(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Later accesses see everything that the writer did before it released the value read.
__device__ __forceinline__ uint32_t ld_acquire_sys(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void st_relaxed_gpu(uint32_t* to, uint32_t value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}

// A single-copy atomic access: data and epoch of a packet are never seen apart.
__device__ __forceinline__ uint64_t ld_relaxed_sys(const uint64_t* from) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t ld_acquire_sys(const uint64_t* from) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void st_relaxed_sys(uint64_t* to, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
}

// Two words in one access, aligned to 16 bytes; each word is atomic, the pair need not be.
__device__ __forceinline__ void st_relaxed_sys(uint64_t* to, uint64_t first, uint64_t second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};"
                 :
                 : "l"(to), "l"(first), "l"(second)
                 : "memory");
}

__device__ __forceinline__ void st_relaxed_sys(uint32_t* to, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}

// A thread that acquires `value` sees everything that this thread did or observed before.
__device__ __forceinline__ void st_release_sys(uint64_t* to, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
}

__device__ __forceinline__ void st_release_sys(uint32_t* to, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t cas_relaxed_gpu(uint32_t* at, uint32_t expected,
                                                    uint32_t desired) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(before)
                 : "l"(at), "r"(expected), "r"(desired)
                 : "memory");
    return before;
}

// As inc_acq_rel_gpu, but orders nothing.
__device__ __forceinline__ uint32_t inc_relaxed_gpu(uint32_t* at, uint32_t last) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(at), "r"(last)
                 : "memory");
    return before;
}

// Counts up to `last`, then starts again at zero; returns the value before.
__device__ __forceinline__ uint32_t inc_acq_rel_gpu(uint32_t* at, uint32_t last) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(at), "r"(last)
                 : "memory");
    return before;
}

__device__ __forceinline__ uint32_t ld_relaxed_sys(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Four words in one access; each word is atomic, the four together need not be.
__device__ __forceinline__ Vec16 ld_relaxed_sys(const Vec16* from) {
    Vec16 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ void st_relaxed_sys(Vec16* to, const Vec16& v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

// Loads data that is not written while the kernel runs, without a place in L1.
__device__ __forceinline__ Vec16 ld_const(const Vec16* from) {
    Vec16 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(from));
    return v;
}

// Stores data that only later kernels read.
__device__ __forceinline__ void st_row(Vec16* to, const Vec16& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Orders everything that this thread did or observed so far before what it does next, for whoever observes the latter.
__device__ __forceinline__ void fence_acq_rel_sys() {
    asm volatile("fence.acq_rel.sys;" : : : "memory");
}

// Loads 16 bytes of shared memory in one access. Loaded member by member, as the compiler likes to, those of a warp's
// lanes conflict, four for each bank.
__device__ __forceinline__ Vec16 ld_shared(const Vec16* from) {
    Vec16 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "r"(shared_address(from))
                 : "memory");
    return v;
}

// The next three are for shared memory that other threads of the block access at the same time.
__device__ __forceinline__ uint32_t ld_acquire_cta_shared(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
                 : "=r"(value)
                 : "r"(shared_address(from))
                 : "memory");
    return value;
}

__device__ __forceinline__ void st_release_cta_shared(uint32_t* to, uint32_t value) {
    asm volatile("st.release.cta.shared.u32 [%0], %1;"
                 :
                 : "r"(shared_address(to)), "r"(value)
                 : "memory");
}

__device__ __forceinline__ uint32_t ld_relaxed_cta_shared(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];"
                 : "=r"(value)
                 : "r"(shared_address(from))
                 : "memory");
    return value;
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;"
                 :
                 : "r"(shared_address(barrier)), "r"(arrivals)
                 : "memory");
}

// Whether the phase with this parity has ended; the first phase has parity 0. A phase ends with its last arrival. A
// thread that finds it ended sees what other threads did before their arrivals.
__device__ __forceinline__ bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t ended;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(ended)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return ended != 0;
}

// Starts to copy 16 bytes to shared memory, bypassing L1, in the group that this thread's next commit closes. Once the
// thread has waited for the group, the copy is ordered like an ordinary load.
__device__ __forceinline__ void async_load(Vec16* shared_to, const Vec16* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(shared_address(shared_to)), "l"(from) : "memory");
}

__device__ __forceinline__ void async_load_commit() {
    asm volatile("cp.async.commit_group;" : : : "memory");
}

// Waits for all of this thread's groups of loads except the last `Groups`.
template <uint32_t Groups>
__device__ __forceinline__ void async_load_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(Groups) : "memory");
}

// Bulk copies: the copy engine of an SM (TMA) moves data between shared memory and global memory of this GPU or a peer.
// Addresses and sizes are multiples of 16. GPUs before sm_90 have none.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define NCCL_EP_HAS_BULK_COPY 1

// Arrives, and makes the current phase wait for `bytes` bytes of bulk loads as well.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// The bytes count towards the current phase of `barrier` as they arrive.
__device__ __forceinline__ void bulk_load(void* shared_to, const void* from, uint32_t bytes,
                                          uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :
        : "r"(shared_address(shared_to)), "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

// Joins the group that this thread's next commit closes.
__device__ __forceinline__ void bulk_store(void* to, const void* shared_from, uint32_t bytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
        :
        : "l"(to), "r"(shared_address(shared_from)), "r"(bytes)
        : "memory");
}

// Closes the group of this thread's bulk stores since its last commit. Waits are for whole groups.
__device__ __forceinline__ void bulk_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// Waits until all of this thread's groups except the last `Groups` have read their shared memory, which may then be
// overwritten.
template <uint32_t Groups = 0>
__device__ __forceinline__ void bulk_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(Groups) : "memory");
}

// Waits until all of this thread's groups except the last `Groups` are complete; its next release covers their stores.
template <uint32_t Groups>
__device__ __forceinline__ void bulk_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" : : "n"(Groups) : "memory");
}

// Proxy fence: what this thread has done or observed in shared memory so far comes before bulk copies that it, or a
// thread that synchronizes with it later, starts. The fence for all memory would also be one of GPU scope, which waits
// behind the SM's stores.
__device__ __forceinline__ void fence_shared_before_bulk() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}
// As fence_shared_before_bulk, for global memory.
__device__ __forceinline__ void fence_global_before_bulk() {
    asm volatile("fence.proxy.async.global;" : : : "memory");
}
#endif

__device__ __forceinline__ float f32_from_f16(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ uint16_t f16_from_f32(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Elementwise maximum of two pairs; where only one element is a NaN, the other one.
__device__ __forceinline__ uint32_t max_bf16x2(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

__device__ __forceinline__ uint32_t max_f16x2(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// `low` goes to the low half.
__device__ __forceinline__ uint32_t bf16x2_from_f32(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// GPUs before sm_89 lack the instruction: there cast.cuh uses integer arithmetic.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define NCCL_EP_HAS_E4M3 1

// `low` goes to the low byte.
__device__ __forceinline__ uint32_t e4m3x2_from_f32(float low, float high) {
    uint16_t bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
}
#endif

// Every polling loop calls this once per iteration. It does nothing on a GPU, where other warps run anyway; in the CPU
// build it lets other threads run.
__device__ __forceinline__ void spin_hint() {}

// Pauses for about 100 ns: for polls by so many warps that they would take bandwidth from the data that they wait for.
__device__ __forceinline__ void spin_gently() { asm volatile("nanosleep.u32 100;"); }

// Pauses for a number of the SM's clock cycles: shorter and more exact than a sleep.
__device__ __forceinline__ void pause_cycles(uint32_t cycles) {
    const auto clock = [] {
        uint32_t now;
        asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
        return now;
    };
    for (const uint32_t begin = clock(); clock() - begin < cycles;) {
    }
}

// The spin_hint of loops that poll this block's shared memory.
__device__ __forceinline__ void shared_spin_hint() {}

// A chunk's flag and the clock are checked once in so many polls of its data, as a check takes as long as many polls:
// more than it takes for many other chunks to arrive. The CPU build, where polls take longer, has its own number.
constexpr uint32_t kPollsOfChunk = 64;

}  // namespace nccl_ep
