// The kernel of the cast on the CPU, by the shim (simt/README.md): block by block, in the order of the stream.
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

// The shim has its own.
#undef __device__
#undef __global__
#undef __host__
#undef __forceinline__
#undef __grid_constant__
#undef __launch_bounds__
#undef __align__
#undef __shared__
#include "simt/cuda_cpu.h"
#include "simt/launch.h"

// Blocks need nothing from each other, so one at a time saves threads.
static thread_local uint3 g_block;
#undef blockIdx
#define blockIdx g_block

#include "programs/ep_bench/cast/kernel.cuh"

namespace ep_bench {
namespace {

void RunCast(void* data) {
    const CastWork& work = *static_cast<const CastWork*>(data);
    const cast::Launch launch = cast::LaunchFor(work);
    for (unsigned block = 0; block < launch.blocks; ++block) {
        simt::Launch({1, cast::kThreads, 0}, block, [&] {
            g_block = {block, 0, 0};
            launch.kernel(work, launch.parts);
        });
    }
}

}  // namespace

cudaError_t EnqueueCast(const CastWork* work, cudaStream_t stream) {
    if (cast::KernelFor(*work) == nullptr) return cudaErrorInvalidValue;
    return cudaLaunchHostFunc(stream, RunCast, const_cast<CastWork*>(work));
}

}  // namespace ep_bench
