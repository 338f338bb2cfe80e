// Which calls of the driver wait for a kernel that runs on another, non-blocking stream: with one block, as
// an all-gather that waits for peers has, and with every SM full, as an operation that waits for them.
// What waits must not be called while the peers may be in the same place (src/backend/quiescence.rs). Then which
// calls of other threads wait while one of those waits.
//
//     nvcc -arch=native -o blocking_calls blocking_calls.cu -lcuda && ./blocking_calls
#include <cuda.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

#include "cuda_check.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLongEnough = std::chrono::milliseconds(250);

__global__ void spin(const volatile int* go) {
    for (long long turn = 0; *go == 0 && turn < (1ll << 33); ++turn) __nanosleep(100);
}
__global__ void nothing() {}

struct Spinning {
    volatile int* go;
    CUcontext context;
    int blocks;
};

// Whether `call`, on a thread of its own, has not returned after a while. It does once the kernel ends.
bool waits(const Spinning& spinning, const std::function<void()>& call, std::thread* thread) {
    auto* done = new std::atomic<bool>(false);
    *thread = std::thread([=] {
        cuCtxSetCurrent(spinning.context);
        call();
        *done = true;
    });
    const auto start = Clock::now();
    while (!*done && Clock::now() - start < kLongEnough) std::this_thread::yield();
    return !*done;  // `done` is left to the thread
}

void probe(const Spinning& spinning, const char* name, const std::function<void()>& call) {
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    *spinning.go = 0;
    spin<<<spinning.blocks, 1024, 0, stream>>>(spinning.go);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::thread caller, launcher;
    const bool call_waits = waits(spinning, call, &caller);
    const bool launch_waits =
        call_waits && waits(spinning, [=] { nothing<<<1, 1, 0, stream>>>(); }, &launcher);
    printf("%-46s %3d blocks: %s%s\n", name, spinning.blocks, call_waits ? "waits" : "returns",
           launch_waits ? ", and so does a launch meanwhile" : "");
    *spinning.go = 1;
    caller.join();
    if (launcher.joinable()) launcher.join();
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamDestroy(stream));
}

void probe_memory(const Spinning& spinning) {
    static char page[4096];
    CUdeviceptr memory, other;
    void* pinned;
    CUstream own;
    cuMemAlloc(&memory, 1 << 20);
    cuMemAlloc(&other, 64 << 20);
    cuMemHostAlloc(&pinned, 4096, CU_MEMHOSTALLOC_DEVICEMAP);
    cuStreamCreate(&own, CU_STREAM_NON_BLOCKING);
    probe(spinning, "cuMemAlloc", [] {
        CUdeviceptr made;
        cuMemAlloc(&made, 256 << 20);
    });
    probe(spinning, "cuMemFree", [=] { cuMemFree(other); });
    CUdeviceptr third;
    cuMemAlloc(&third, 512 << 20);
    probe(spinning, "cuMemFreeAsync of what cuMemAlloc gave", [=] {
        size_t before, after, total;
        cuMemGetInfo(&before, &total);
        cuMemFreeAsync(third, own);
        cuStreamSynchronize(own);
        cuMemGetInfo(&after, &total);
        printf("%ld MiB more are free\n", (long)(after - before) >> 20);
    });
    probe(spinning, "cuMemHostRegister", [] {
        cuMemHostRegister(aligned_alloc(4096, 4096), 4096, CU_MEMHOSTREGISTER_DEVICEMAP);
    });
    probe(spinning, "cuMemHostAlloc", [] {
        void* made;
        cuMemHostAlloc(&made, 4096, CU_MEMHOSTALLOC_DEVICEMAP);
    });
    probe(spinning, "cuMemFreeHost", [=] { cuMemFreeHost(pinned); });
    probe(spinning, "memset and wait, on a non-blocking stream", [=] {
        cuMemsetD8Async(memory, 0, 1 << 20, own);
        cuStreamSynchronize(own);
    });
    probe(spinning, "copy and wait, on a non-blocking stream", [=] {
        cuMemcpyHtoDAsync(memory, page, sizeof(page), own);
        cuStreamSynchronize(own);
    });
    probe(spinning, "cuStreamDestroy", [=] { cuStreamDestroy(own); });
    probe(spinning, "cuCtxSynchronize", [] { cuCtxSynchronize(); });
}

void probe_imports(const Spinning& spinning, const CUipcMemHandle& exported) {
    static CUdeviceptr mapped;
    constexpr auto kLazy = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
    probe(spinning, "cuIpcOpenMemHandle", [&] { cuIpcOpenMemHandle(&mapped, exported, kLazy); });
    probe(spinning, "cuIpcCloseMemHandle", [] { cuIpcCloseMemHandle(mapped); });
}

// Whether `call` waits in one thread while another frees memory and waits for a kernel.
void probe_beside_free(const Spinning& spinning, const char* name, const std::function<void()>& call) {
    cudaStream_t stream;
    void* pinned;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaHostAlloc(&pinned, 4096, cudaHostAllocMapped));
    *spinning.go = 0;
    spin<<<spinning.blocks, 32, 0, stream>>>(spinning.go);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::thread freer, caller;
    const bool free_waits = waits(spinning, [=] { cuMemFreeHost(pinned); }, &freer);
    const bool call_waits = waits(spinning, call, &caller);
    printf("%-46s beside cuMemFreeHost, which %s: %s\n", name, free_waits ? "waits" : "returns",
           call_waits ? "waits" : "returns");
    *spinning.go = 1;
    caller.join();
    freer.join();
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamDestroy(stream));
}

void probe_all_beside_free(const Spinning& spinning) {
    static int word;
    void* memory;
    cudaStream_t own;
    cudaEvent_t past, made;
    CHECK(cudaMalloc(&memory, 4096));
    CHECK(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&past, cudaEventDisableTiming));
    CHECK(cudaEventRecord(past, own));
    CHECK(cudaStreamSynchronize(own));
    const CUcontext context = spinning.context;
    const auto probe = [&](const char* name, const std::function<void()>& call) {
        probe_beside_free(spinning, name, call);
    };
    probe("nothing", [] {});
    probe("cuCtxPushCurrent, cuCtxPopCurrent", [=] {
        CUcontext popped;
        cuCtxPushCurrent(context);
        cuCtxPopCurrent(&popped);
    });
    probe("cuCtxGetDevice", [] {
        CUdevice device;
        cuCtxGetDevice(&device);
    });
    probe("cudaSetDevice", [] { cudaSetDevice(0); });
    probe("cuEventQuery", [=] { cuEventQuery(past); });
    probe("cuStreamQuery", [=] { cuStreamQuery(own); });
    probe("cuStreamSynchronize, of an idle stream", [=] { cuStreamSynchronize(own); });
    probe("cuStreamIsCapturing", [=] {
        CUstreamCaptureStatus status;
        cuStreamIsCapturing(own, &status);
    });
    probe("cuEventCreate", [&] { cudaEventCreateWithFlags(&made, cudaEventDisableTiming); });
    probe("cuEventRecord", [=] { cuEventRecord(past, own); });
    probe("cuStreamWaitEvent", [=] { cuStreamWaitEvent(own, past, 0); });
    probe("cuMemcpyHtoDAsync", [=] { cuMemcpyHtoDAsync((CUdeviceptr)memory, &word, 4, own); });
    cudaEvent_t old;
    cudaStream_t idle;
    CHECK(cudaEventCreateWithFlags(&old, cudaEventDisableTiming));
    CHECK(cudaStreamCreateWithFlags(&idle, cudaStreamNonBlocking));
    probe("cuEventDestroy", [=] { cuEventDestroy(old); });
    probe("cuStreamDestroy", [=] { cuStreamDestroy(idle); });
    probe("cuStreamCreate", [] {
        CUstream created;
        cuStreamCreate(&created, CU_STREAM_NON_BLOCKING);
    });
    probe("cuMemAlloc", [] {
        CUdeviceptr allocated;
        cuMemAlloc(&allocated, 1 << 20);
    });
    static CUdeviceptr given;
    cuMemAlloc(&given, 1 << 20);
    probe("cuMemFreeAsync of what cuMemAlloc gave", [=] { cuMemFreeAsync(given, own); });
    probe("a launch", [=] { nothing<<<1, 1, 0, own>>>(); });
    CHECK(cudaDeviceSynchronize());
}

// Another process exports memory until this one has ended with it.
pid_t start_exporter(int* handles, int* end) {
    int to_parent[2], to_child[2];
    if (pipe(to_parent) != 0 || pipe(to_child) != 0) return -1;
    *handles = to_parent[0];
    *end = to_child[1];
    const pid_t child = fork();
    if (child != 0) return child;
    void* memory;
    cudaIpcMemHandle_t handle;
    CHECK(cudaMalloc(&memory, 8 << 20));
    CHECK(cudaIpcGetMemHandle(&handle, memory));
    char said;
    _exit(write(to_parent[1], &handle, sizeof(handle)) < 0 || read(to_child[0], &said, 1) < 0);
}

}  // namespace

int main() {
    int handles, end;
    const pid_t exporter = start_exporter(&handles, &end);
    CUipcMemHandle exported;
    if (exporter < 0 || read(handles, &exported, sizeof(exported)) < 0) return 1;
    Spinning spinning = {};
    CHECK(cudaHostAlloc((void**)&spinning.go, sizeof(int), cudaHostAllocMapped));
    cuCtxGetCurrent(&spinning.context);
    nothing<<<1, 1>>>();
    CHECK(cudaDeviceSynchronize());
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    for (const int blocks : {1, 2 * properties.multiProcessorCount}) {
        spinning.blocks = blocks;
        probe_memory(spinning);
        probe_imports(spinning, exported);
    }
    spinning.blocks = 1;
    probe_all_beside_free(spinning);
    const char over = 1;
    const bool written = write(end, &over, 1) == 1;
    waitpid(exporter, nullptr, 0);
    return written ? 0 : 1;
}
