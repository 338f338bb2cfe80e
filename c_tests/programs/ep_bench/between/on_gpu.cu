// Straight code of more than an instruction cache holds, on every SM, with as much shared memory as a block of a
// matrix product takes.
#include "programs/ep_bench/between/between.h"

namespace ep_bench {
namespace {

constexpr int kThreads = 128;
constexpr int kSharedBytes = 200 << 10;
// Of 16 bytes each.
constexpr int kInstructions = 10240;

template <int kCode>
__global__ void __launch_bounds__(kThreads) RunCode(float* sink) {
    float x = static_cast<float>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kInstructions; ++i) x = __fmaf_rn(x, 1.0f + static_cast<float>(i) * (3 + kCode) * 1e-7f, x);
    if (x == 12345.678f) *sink = x;  // so that it has to be computed
}

cudaError_t CountBlocks(int* blocks) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    return cudaDeviceGetAttribute(blocks, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace

cudaError_t EnqueueCode(cudaStream_t stream, unsigned turn) {
    void (*const codes[kCodes])(float*) = {RunCode<0>, RunCode<1>};
    void (*const code)(float*) = codes[turn % kCodes];
    int blocks = 0;
    cudaError_t error = CountBlocks(&blocks);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(code, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    float* sink = nullptr;
    code<<<blocks, kThreads, kSharedBytes, stream>>>(sink);
    return cudaGetLastError();
}

}  // namespace ep_bench
