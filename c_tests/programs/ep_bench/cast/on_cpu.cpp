// The kernel of the cast in the CPU build: block by block, in the order of the stream.
#include <cuda_fp8.h>

#include "cpu_build.h"
#include "programs/ep_bench/cast/kernel.cuh"

namespace ep_bench {
namespace {

void RunCast(void* data) {
    const CastWork& work = *static_cast<const CastWork*>(data);
    const cast::Launch launch = cast::LaunchFor(work);
    cpu_build::RunGrid(launch.blocks, cast::kThreads, [&] { launch.kernel(work, launch.parts); });
}

}  // namespace

cudaError_t EnqueueCast(const CastWork* work, cudaStream_t stream) {
    if (cast::KernelFor(*work) == nullptr) return cudaErrorInvalidValue;
    return cudaLaunchHostFunc(stream, RunCast, const_cast<CastWork*>(work));
}

}  // namespace ep_bench
