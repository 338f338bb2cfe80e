// What calls of the driver cost the host, and whether an event behind each kernel costs the device
// (docs/development/host-time.md).
//
//     nvcc -O2 -std=c++17 -arch=sm_90 bench/host_calls.cu -lcuda -o /tmp/host_calls && /tmp/host_calls
//
// Needs one GPU. Under mpirun each process measures for itself, all on the first GPU unless
// CUDA_VISIBLE_DEVICES gives each its own.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "cuda_check.h"

namespace {

constexpr int kSamples = 300;
constexpr int kKernelsInARow = 200;

template <int kBytes>
struct Params {
    char bytes[kBytes];
};

template <int kBytes>
__global__ void nothing(const __grid_constant__ Params<kBytes> params) {
    if (threadIdx.x > 4096) std::printf("%d", params.bytes[0]);  // keeps the parameter
}

__global__ void last_for(unsigned long long ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < ns);
}

template <typename Call>
double microseconds(Call call) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> samples) {
    std::sort(samples.begin(), samples.end());
    return samples[samples.size() / 2];
}

// A call from an idle stream, and one right behind it.
template <typename Call>
void time_call(CUstream stream, const char* name, Call call) {
    std::vector<double> first, second;
    for (int i = 0; i < kSamples; ++i) {
        CHECK(cuStreamSynchronize(stream));
        first.push_back(microseconds(call));
        second.push_back(microseconds(call));
    }
    std::printf("%-40s first %6.3f second %6.3f us\n", name, median(first), median(second));
}

template <int kBytes>
class Launch {
   public:
    explicit Launch(CUstream stream) {
        cudaFunction_t found = nullptr;
        const auto* symbol = reinterpret_cast<const void*>(nothing<kBytes>);
        CHECK(cudaGetFuncBySymbol(&found, symbol));
        function_ = reinterpret_cast<CUfunction>(found);
        config_.gridDimX = 60;
        config_.blockDimX = 512;
        config_.gridDimY = config_.gridDimZ = config_.blockDimY = config_.blockDimZ = 1;
        config_.hStream = stream;
    }
    void operator()() {
        void* arguments[] = {&params_};
        CHECK(cuLaunchKernelEx(&config_, function_, arguments, nullptr));
    }

   private:
    Params<kBytes> params_{};
    CUfunction function_ = nullptr;
    CUlaunchConfig config_{};
};

// A launch when the host has waited for a kernel of that length.
void time_after_waiting(CUstream stream, unsigned kernel_us) {
    Launch<784> launch(stream);
    std::vector<double> samples;
    for (int i = 0; i < 60; ++i) {
        last_for<<<1, 1, 0, stream>>>(1000ULL * kernel_us);
        CHECK(cuStreamSynchronize(stream));
        samples.push_back(microseconds(launch));
    }
    std::printf("launch after a kernel of %5u us %24.3f us\n", kernel_us, median(samples));
}

// From one event to the next with an empty kernel between them, on an idle stream: what any operation
// takes there, if it does nothing.
void time_from_an_idle_stream(CUstream stream) {
    Launch<784> launch(stream);
    CUevent begin, end;
    CHECK(cuEventCreate(&begin, CU_EVENT_DEFAULT));
    CHECK(cuEventCreate(&end, CU_EVENT_DEFAULT));
    std::vector<double> samples;
    for (int i = 0; i < kSamples; ++i) {
        CHECK(cuEventRecord(begin, stream));
        launch();
        CHECK(cuEventRecord(end, stream));
        CHECK(cuStreamSynchronize(stream));
        float ms = 0;
        CHECK(cuEventElapsedTime(&ms, begin, end));
        samples.push_back(1000 * ms);
    }
    std::printf("event, empty kernel, event %28.3f us\n", median(samples));
}

// Kernels of 10 us, all enqueued before the first one begins.
template <typename Between>
void time_in_a_row(CUstream stream, const char* name, Between between) {
    CUevent begin, end;
    CHECK(cuEventCreate(&begin, CU_EVENT_DEFAULT));
    CHECK(cuEventCreate(&end, CU_EVENT_DEFAULT));
    std::vector<double> samples;
    for (int i = 0; i < 9; ++i) {
        last_for<<<1, 1, 0, stream>>>(3'000'000);
        CHECK(cuEventRecord(begin, stream));
        for (int kernel = 0; kernel < kKernelsInARow; ++kernel) {
            last_for<<<60, 512, 0, stream>>>(10'000);
            between();
        }
        CHECK(cuEventRecord(end, stream));
        CHECK(cuStreamSynchronize(stream));
        float ms = 0;
        CHECK(cuEventElapsedTime(&ms, begin, end));
        samples.push_back(1000 * ms / kKernelsInARow);
    }
    std::printf("kernels of 10 us, %-22s each %10.3f us\n", name, median(samples));
}

}  // namespace

int main() {
    CHECK(cudaFree(nullptr));  // makes the context
    CUstream stream;
    CUevent event;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    time_call(stream, "cuLaunchKernelEx, 64 B of parameters", Launch<64>(stream));
    time_call(stream, "cuLaunchKernelEx, 784 B", Launch<784>(stream));
    time_call(stream, "cuLaunchKernelEx, 1536 B", Launch<1536>(stream));
    time_call(stream, "cuEventRecord", [&] { CHECK(cuEventRecord(event, stream)); });
    time_call(stream, "cuStreamGetId", [&] {
        unsigned long long id;
        CHECK(cuStreamGetId(stream, &id));
    });
    time_call(stream, "cuStreamIsCapturing", [&] {
        CUstreamCaptureStatus status;
        CHECK(cuStreamIsCapturing(stream, &status));
    });
    time_call(stream, "cuCtxGetCurrent", [&] {
        CUcontext context;
        CHECK(cuCtxGetCurrent(&context));
    });
    time_call(stream, "nothing", [] {});
    time_in_a_row(stream, "nothing between", [] {});
    time_in_a_row(stream, "an event between", [&] { CHECK(cuEventRecord(event, stream)); });
    for (const unsigned us : {5, 20, 100, 500, 1000, 4000}) time_after_waiting(stream, us);
    time_from_an_idle_stream(stream);
}
