// What the driver keeps of kernels that were loaded and unloaded, how long that takes, and whether a context that is
// reset, or released and retained, has another number (src/backend/cuda/driver/context_resources.rs).
//
//     nvcc -O2 -std=c++17 -arch=native bench/module_loads.cu -lcuda -o /tmp/module_loads
//     /tmp/module_loads target/release/build/nccl-ep-core-*/out/*.fatbin
//
// Each file becomes a module, as in the library.
//
// Needs one GPU and a driver for CUDA 12.4 or newer.
#include <cuda.h>
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

#include "cuda_check.h"

namespace {

constexpr int kRounds = 40;

struct Memory {
    long resident_kib;
    long free_kib;  // of the device
};

Memory memory() {
    long total = 0;
    long resident = 0;
    std::ifstream("/proc/self/statm") >> total >> resident;
    size_t free_bytes = 0;
    size_t all_bytes = 0;
    CHECK(cuMemGetInfo(&free_bytes, &all_bytes));
    return {resident * (sysconf(_SC_PAGESIZE) / 1024), static_cast<long>(free_bytes / 1024)};
}

double microseconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
        .count();
}

using Image = std::vector<char>;

void get_kernels(CUmodule module) {
    unsigned count = 0;
    CHECK(cuModuleGetFunctionCount(&count, module));
    std::vector<CUfunction> kernels(count);
    CHECK(cuModuleEnumerateFunctions(kernels.data(), count, module));
    for (CUfunction kernel : kernels) {
        const char* name = nullptr;
        CUfunction named;
        CHECK(cuFuncGetName(&name, kernel));
        CHECK(cuModuleGetFunction(&named, module, name));
        int threads = 0;
        CHECK(cuFuncGetAttribute(&threads, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, named));
    }
}

// Loads all, gets each kernel as the library does, and unloads; returns how long loading took.
double load_once(const std::vector<Image>& images) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<CUmodule> modules(images.size());
    for (size_t i = 0; i < images.size(); ++i) {
        CHECK(cuModuleLoadData(&modules[i], images[i].data()));
        get_kernels(modules[i]);
    }
    const double took = microseconds_since(start);
    for (CUmodule module : modules) CHECK(cuModuleUnload(module));
    return took;
}

void count_what_loads_keep(const std::vector<Image>& images) {
    (void)load_once(images);
    const Memory before = memory();
    std::vector<double> took;
    for (int round = 0; round < kRounds; ++round) took.push_back(load_once(images));
    const Memory after = memory();
    std::nth_element(took.begin(), took.begin() + kRounds / 2, took.end());
    std::printf("loads %d, each keeps %ld KiB of the host and %ld KiB of the device, takes %.0f us\n",
                kRounds, (after.resident_kib - before.resident_kib) / kRounds,
                (before.free_kib - after.free_kib) / kRounds, took[kRounds / 2]);
}

void show_context(const char* when) {
    CUcontext context;
    unsigned long long number = 0;
    CHECK(cuCtxGetCurrent(&context));
    CHECK(cuCtxGetId(nullptr, &number));
    std::printf("%s: context %p, number %llu\n", when, static_cast<void*>(context), number);
}

void show_contexts() {
    show_context("the runtime's");
    CHECK(cudaDeviceReset());
    CHECK(cudaFree(nullptr));
    show_context("after a reset");
    CHECK(cudaDeviceReset());
    CHECK(cuCtxSetCurrent(nullptr));
    for (int round = 0; round < 2; ++round) {
        CUcontext context;
        CHECK(cuDevicePrimaryCtxRetain(&context, 0));
        CHECK(cuCtxPushCurrent(context));
        show_context("retained");
        CHECK(cuCtxPopCurrent(&context));
        CHECK(cuDevicePrimaryCtxRelease(0));
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) {
        std::printf("usage: module_loads FATBIN...\n");
        return 2;
    }
    std::vector<Image> images;
    for (int i = 1; i < argc; ++i) {
        std::ifstream file(argv[i], std::ios::binary);
        images.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    CHECK(cudaFree(nullptr));
    count_what_loads_keep(images);
    show_contexts();
    return 0;
}
