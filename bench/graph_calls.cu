// What may be asked about a stream while it is captured, and whether an edge of a graph that follows
// from others costs anything (docs/development/host-time.md).
//
//     nvcc -O2 -std=c++17 -arch=sm_90 bench/graph_calls.cu -lcuda -o /tmp/graph_calls && /tmp/graph_calls
//
// Needs one GPU.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "cuda_check.h"

namespace {

constexpr int kReplays = 500;
constexpr int kOperations = 32;

__global__ void count(unsigned* counter) {
    if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(counter, 1);
}

cudaStream_t new_stream() {
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

// ---- Questions ----------------------------------------------------------------------------------

// Asks `call` about a stream while `captured` is being captured.
template <typename Call>
void ask(const char* name, CUstream captured, CUstream stream, Call call) {
    CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
    const CUresult answer = call(stream);
    cudaGraph_t graph = nullptr;
    const cudaError_t end = cudaStreamEndCapture(captured, &graph);
    if (graph != nullptr) CHECK(cudaGraphDestroy(graph));
    cudaGetLastError();  // of a capture that has become invalid
    std::printf("%-20s %-16s answer %3d, end of the capture %3d\n", name,
                stream == captured ? "captured stream" : "another stream", answer, end);
}

void questions() {
    const cudaStream_t captured = new_stream(), another = new_stream();
    for (const cudaStream_t stream : {captured, another}) {
        ask("cuStreamGetId", captured, stream, [](CUstream it) {
            unsigned long long id;
            return cuStreamGetId(it, &id);
        });
        ask("cuStreamIsCapturing", captured, stream, [](CUstream it) {
            CUstreamCaptureStatus status;
            return cuStreamIsCapturing(it, &status);
        });
        ask("cuStreamGetCtx", captured, stream, [](CUstream it) {
            CUcontext context;
            return cuStreamGetCtx(it, &context);
        });
    }
}

// ---- Edges --------------------------------------------------------------------------------------

double median_of_replays(cudaGraph_t graph, cudaStream_t stream) {
    cudaGraphExec_t program;
    CHECK(cudaGraphInstantiate(&program, graph, 0));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<float> samples(kReplays);
    for (float& sample : samples) {
        CHECK(cudaEventRecord(begin, stream));
        CHECK(cudaGraphLaunch(program, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&sample, begin, end));
    }
    CHECK(cudaGraphExecDestroy(program));
    std::sort(samples.begin(), samples.end());
    return 1e3 * samples[kReplays / 2];
}

size_t count_edges(cudaGraph_t graph) {
    size_t edges = 0;
#if CUDART_VERSION >= 13000
    CHECK(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &edges));
#else
    CHECK(cudaGraphGetEdges(graph, nullptr, nullptr, &edges));
#endif
    return edges;
}

// A graph of operations on one stream, each followed by `between` other kernels; with `waits` each
// operation also waits for an event behind the one before.
void operations(int between, bool waits) {
    const cudaStream_t stream = new_stream();
    cudaEvent_t done;
    CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    unsigned* counter;
    CHECK(cudaMalloc(&counter, sizeof(*counter)));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kOperations; ++i) {
        if (waits && i > 0) CHECK(cudaStreamWaitEvent(stream, done, 0));
        count<<<64, 512, 0, stream>>>(counter);
        if (waits) CHECK(cudaEventRecord(done, stream));
        for (int k = 0; k < between; ++k) count<<<132, 256, 0, stream>>>(counter);
    }
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream, &graph));
    std::printf("%d operations, %d kernels behind each, %-13s %3zu edges, %6.2f us\n", kOperations,
                between, waits ? "with waits:" : "without:", count_edges(graph),
                median_of_replays(graph, stream));
    CHECK(cudaGraphDestroy(graph));
}

}  // namespace

int main() {
    CHECK(cudaFree(nullptr));  // makes the context
    questions();
    for (const int between : {0, 1, 3}) {
        for (const bool waits : {false, true}) operations(between, waits);
    }
}
