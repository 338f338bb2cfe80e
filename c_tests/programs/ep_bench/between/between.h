// What --between code runs between operations: a kernel that leaves nothing of theirs in the instruction caches,
// as the other kernels of a model do. A program is linked with one of on_gpu.cu and on_cpu.cpp.
#pragma once

#include <cuda_runtime_api.h>

namespace ep_bench {

// Several kernels, equal but for their code, take turns: one that followed itself would find the code that the
// operation in between has not displaced, so that displacement would count as time of the operation.
constexpr unsigned kCodes = 2;

// Enqueues number `turn` modulo kCodes. Without a GPU there is nothing to enqueue.
cudaError_t EnqueueCode(cudaStream_t stream, unsigned turn);

// Microseconds that these kernels took from the first block's begin to the last one's end: the mean of those that have
// ended since the last call. The stream must be idle.
double TakeCodeUs();

}  // namespace ep_bench
