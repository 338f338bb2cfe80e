// Straight code of more than an instruction cache holds, on every SM, with as much shared memory as a block of a
// matrix product takes.
#include "programs/ep_bench/between/between.h"

namespace ep_bench {
namespace {

constexpr int kThreads = 128;
constexpr int kSharedBytes = 200 << 10;
// Of 16 bytes each.
constexpr int kInstructions = 10240;

// What the kernels have taken.
struct Taken {
    unsigned long long total_ns;
    unsigned long long kernels;
    // Of the one that runs.
    unsigned long long begin_ns;
    unsigned ended_blocks;
};
constexpr Taken kNothingTaken = {0, 0, ~0ull, 0};
__device__ Taken taken = kNothingTaken;

__device__ unsigned long long NowNs() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) : : "memory");
    return now;
}

// The last block to end notes what the kernel has taken.
__device__ void End(unsigned long long begin_ns) {
    if (threadIdx.x != 0) return;
    atomicMin(&taken.begin_ns, begin_ns);
    __threadfence();
    if (atomicInc(&taken.ended_blocks, gridDim.x - 1) != gridDim.x - 1) return;
    taken.total_ns += NowNs() - atomicExch(&taken.begin_ns, kNothingTaken.begin_ns);
    ++taken.kernels;
}

template <int kCode>
__global__ void __launch_bounds__(kThreads) RunCode(float* sink) {
    const unsigned long long begin_ns = NowNs();
    float x = static_cast<float>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kInstructions; ++i) x = __fmaf_rn(x, 1.0f + static_cast<float>(i) * (3 + kCode) * 1e-7f, x);
    if (x == 12345.678f) *sink = x;  // so that it has to be computed
    End(begin_ns);
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

double TakeCodeUs() {
    Taken now = kNothingTaken;
    if (cudaMemcpyFromSymbol(&now, taken, sizeof(now)) != cudaSuccess || now.kernels == 0) return 0;
    return cudaMemcpyToSymbol(taken, &kNothingTaken, sizeof(now)) == cudaSuccess ? now.total_ns / 1e3 / now.kernels : 0;
}

}  // namespace ep_bench
