// How a kernel is defined: ENTRY(name) { ... }, in the namespace of what it calls. It takes `params`, whose type and
// the launch bounds are what the list of kernels says (params/kernels.h); other names do not compile.
#pragma once

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
