// What --between code runs between operations: a kernel that leaves nothing of theirs in the instruction caches,
// as the other kernels of a model do. A program is linked with one of on_gpu.cu and on_cpu.cpp.
#pragma once

#include <cuda_runtime_api.h>

namespace ep_bench {

// Enqueues it. Without a GPU there is nothing to enqueue.
cudaError_t EnqueueCode(cudaStream_t stream);

}  // namespace ep_bench
