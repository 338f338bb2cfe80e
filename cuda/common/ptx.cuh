// Every asm statement of the project, under a name that says order and scope.
//
// Kernels contain none, so that what a kernel relies on can be read here in one place, and so that a
// CPU stand-in needs to replace this header only. "sys" reaches other GPUs and the host, "gpu" this
// GPU alone. Nothing here knows what the bytes mean.
#pragma once

#include <cstdint>

namespace nccl_ep {

// Nanoseconds of a clock that never stops. Coarse (about a microsecond): for deadlines only.
__device__ __forceinline__ uint64_t globaltimer_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// What follows sees everything that the writer did before its release of the value read.
__device__ __forceinline__ uint32_t ld_acquire_sys(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// A value that only tells whether to go on; orders nothing.
__device__ __forceinline__ uint32_t ld_relaxed_gpu(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Whoever acquires `value` sees everything that this thread did or observed before.
__device__ __forceinline__ void st_release_sys(uint32_t* to, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}

// Returns the value before; stores `desired` if that was `expected`.
__device__ __forceinline__ uint32_t cas_relaxed_gpu(uint32_t* at, uint32_t expected,
                                                    uint32_t desired) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(before)
                 : "l"(at), "r"(expected), "r"(desired)
                 : "memory");
    return before;
}

// Every polling loop calls this once per turn: it leaves the issue slots to other warps, and it is
// where a CPU stand-in lets other threads run.
__device__ __forceinline__ void spin_hint() {
    asm volatile("nanosleep.u32 20;");
}

}  // namespace nccl_ep
