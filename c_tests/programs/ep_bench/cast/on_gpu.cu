// The cast on a GPU.
#include "programs/ep_bench/cast/kernel.cuh"

namespace ep_bench {

cudaError_t EnqueueCast(const CastWork* work, cudaStream_t stream) {
    cast::Launch launch = cast::LaunchFor(*work);
    if (launch.kernel == nullptr) return cudaErrorInvalidValue;
    if (launch.blocks == 0) return cudaSuccess;  // a grid has at least one
    CastWork copy = *work;
    void* arguments[] = {&copy, &launch.parts};
    return cudaLaunchKernel(reinterpret_cast<const void*>(launch.kernel), dim3(launch.blocks),
                            dim3(cast::kThreads), arguments, 0, stream);
}

}  // namespace ep_bench
