// Defines kernels: ENTRY(name) { ... }. The list of kernels (params/kernels.h) gives the type of their only argument,
// `params`, and their launch bounds; a name that is not listed does not compile.
// ENTRY_BY_TYPE(name, run<T>(params)) defines name_bf16, name_f16 and name_f32, each with its T.
#pragma once

#include "numeric.cuh"
#include "params/kernels.h"
#include "primitive.cuh"

namespace nccl_ep::listed {

#define NCCL_EP_LISTED(kernel, type, threads, blocks) \
    struct kernel {                                   \
        using Params = type;                          \
        static constexpr unsigned kThreads = threads; \
        static constexpr unsigned kBlocks = blocks;   \
    };
NCCL_EP_KERNELS(NCCL_EP_LISTED)
#undef NCCL_EP_LISTED

}  // namespace nccl_ep::listed

#define ENTRY(kernel)                                                                               \
    extern "C" __global__ void __launch_bounds__(listed::kernel::kThreads, listed::kernel::kBlocks) \
        kernel(const __grid_constant__ listed::kernel::Params params)

#define ENTRY_BY_TYPE(kernel, ...)                        \
    ENTRY(kernel##_bf16) { using T = Bf16; __VA_ARGS__; } \
    ENTRY(kernel##_f16) { using T = F16; __VA_ARGS__; }   \
    ENTRY(kernel##_f32) { using T = F32; __VA_ARGS__; }
