// What a mark costs that each replay of a graph leaves: a word that says an operation has begun, or that it is over
// (docs/development/host-time.md). The marks stand between kernels, as those of an exchange of NCCL do.
//
//     nvcc -O2 -std=c++17 -arch=sm_90 bench/graph_marks.cu -lcuda -o /tmp/graph_marks && /tmp/graph_marks
//
// Needs one GPU.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <vector>

#include "cuda_check.h"

namespace {

constexpr int kReplays = 300;
constexpr int kOperations = 16;  // of a graph, each with two marks

// About as long as a small exchange of NCCL takes its multiprocessor.
__global__ void work(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {
    }
}

__global__ void store(volatile uint64_t* word, uint64_t value) { *word = value; }

__global__ void store_time(volatile uint64_t* word) {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    *word = now;
}

struct Words {
    uint64_t* host;    // pinned and mapped
    uint64_t* mapped;  // the same, as the device sees it
    uint64_t* device;
};

using Mark = std::function<void(const Words&, cudaStream_t, bool begins)>;

double replays(const Words& words, const Mark* mark, bool waits) {
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    for (int operation = 0; operation < kOperations; ++operation) {
        work<<<8, 128, 0, stream>>>(2000);
        if (mark != nullptr) (*mark)(words, stream, true);
        work<<<4, 512, 0, stream>>>(2000);
        if (mark != nullptr) (*mark)(words, stream, false);
    }
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t program = nullptr;
    const cudaError_t captured = cudaStreamEndCapture(stream, &graph);
    if (captured != cudaSuccess) {
        std::printf("not captured: %s\n", cudaGetErrorString(captured));
        (void)cudaGetLastError();
        return 0;
    }
    CHECK(cudaGraphInstantiate(&program, graph, 0));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<float> samples(kReplays);
    for (float& sample : samples) {
        CHECK(cudaEventRecord(begin, stream));
        // From an idle stream the launch of the graph counts, too; behind another one it is hidden.
        CHECK(cudaGraphLaunch(program, stream));
        if (!waits) CHECK(cudaGraphLaunch(program, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&sample, begin, end));
        if (!waits) sample /= 2;
    }
    CHECK(cudaGraphExecDestroy(program));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));
    std::sort(samples.begin(), samples.end());
    return 1e3 * samples[kReplays / 2] / kOperations;
}

}  // namespace

int main() {
    Words words;
    CHECK(cudaHostAlloc(&words.host, 256, cudaHostAllocMapped | cudaHostAllocPortable));
    CHECK(cudaHostGetDevicePointer(&words.mapped, words.host, 0));
    CHECK(cudaMalloc(&words.device, 256));
    const struct {
        const char* name;
        Mark mark;
    } marks[] = {
        {"copy of a word from the host",
         [](const Words& it, cudaStream_t stream, bool begins) {
             CHECK(cudaMemcpyAsync(it.device, it.host + begins, 4, cudaMemcpyHostToDevice, stream));
         }},
        {"copy of a word on the device",
         [](const Words& it, cudaStream_t stream, bool begins) {
             CHECK(cudaMemcpyAsync(it.device, it.device + 1 + begins, 4, cudaMemcpyDeviceToDevice,
                                   stream));
         }},
        {"kernel, to the device",
         [](const Words& it, cudaStream_t stream, bool begins) {
             store<<<1, 1, 0, stream>>>(it.device, begins);
         }},
        {"kernel, to the host",
         [](const Words& it, cudaStream_t stream, bool begins) {
             store<<<1, 1, 0, stream>>>(it.mapped, begins);
         }},
        {"kernel, time to the host",
         [](const Words& it, cudaStream_t stream, bool begins) {
             if (begins) {
                 store_time<<<1, 1, 0, stream>>>(it.mapped);
             } else {
                 store<<<1, 1, 0, stream>>>(it.mapped, 0);
             }
         }},
        {"cuStreamWriteValue64, to the device",
         [](const Words& it, cudaStream_t stream, bool begins) {
             CHECK(cuStreamWriteValue64(stream, reinterpret_cast<CUdeviceptr>(it.device), begins,
                                        CU_STREAM_WRITE_VALUE_DEFAULT));
         }},
        {"cuStreamWriteValue64, to the host",
         [](const Words& it, cudaStream_t stream, bool begins) {
             CHECK(cuStreamWriteValue64(stream, reinterpret_cast<CUdeviceptr>(it.mapped), begins,
                                        CU_STREAM_WRITE_VALUE_DEFAULT));
         }},
        {"memset of a word",
         [](const Words& it, cudaStream_t stream, bool begins) {
             CHECK(cudaMemsetAsync(it.device, begins, 4, stream));
         }},
    };
    std::printf("us for one mark: 2 between kernels in each of %d operations of a graph\n",
                kOperations);
    for (const bool waits : {true, false}) {
        std::printf("%s\n", waits ? "from an idle stream" : "two replays behind each other");
        const double without = replays(words, nullptr, waits);
        std::printf("  %-38s %6.2f an operation\n", "no mark", without);
        for (const auto& [name, mark] : marks) {
            const double with = replays(words, &mark, waits);
            std::printf("  %-38s %6.2f\n", name, (with - without) / 2);
            std::fflush(stdout);
        }
    }
    return 0;
}
