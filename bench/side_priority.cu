// Whether a stream of the greatest priority gets a chain of small kernels through sooner beside a matrix product, as
// the library's side streams have them over nodes: pack, exchange, relay (src/backend/cuda/side_streams.rs).
//
//     nvcc -O2 -std=c++17 -arch=sm_90 bench/side_priority.cu -o /tmp/side_priority && /tmp/side_priority
//
// Needs one GPU. The product's blocks are ones that fill a multiprocessor each for a set time, in many waves.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "cuda_check.h"

namespace {

constexpr int kChains = 100;
constexpr int kTileThreads = 384;
// As a tile of a product has it: no second block fits beside it.
constexpr int kTileSharedBytes = 200 << 10;
constexpr int kBusyNs = 5'000'000;  // of the product behind which a chain is launched

__device__ void busy(long long ns) {
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
}

__global__ void product(long long tile_ns) { busy(tile_ns); }
__global__ void small(long long ns) { busy(ns); }

struct Streams {
    cudaStream_t compute;
    cudaStream_t side;
};

struct Taken {
    float chain_us;
    float product_ms;
};

// The side stream begins once the product runs.
Taken run_once(const Streams& streams, const cudaEvent_t (&events)[4], int multiprocessors,
               long long tile_ns) {
    const int tiles = multiprocessors * static_cast<int>(kBusyNs / tile_ns);
    CHECK(cudaEventRecord(events[0], streams.compute));
    // A wave that is over when the side stream begins; its tiles are followed by others at once.
    product<<<multiprocessors, kTileThreads, kTileSharedBytes, streams.compute>>>(tile_ns / 2);
    CHECK(cudaStreamWaitEvent(streams.side, events[0], 0));
    product<<<tiles, kTileThreads, kTileSharedBytes, streams.compute>>>(tile_ns);
    CHECK(cudaEventRecord(events[1], streams.compute));
    CHECK(cudaEventRecord(events[2], streams.side));
    small<<<16, 512, 0, streams.side>>>(3000);    // pack
    small<<<4, 640, 0, streams.side>>>(15000);    // the exchange
    small<<<32, 1024, 0, streams.side>>>(10000);  // the relay
    CHECK(cudaEventRecord(events[3], streams.side));
    CHECK(cudaDeviceSynchronize());
    Taken taken;
    CHECK(cudaEventElapsedTime(&taken.product_ms, events[0], events[1]));
    CHECK(cudaEventElapsedTime(&taken.chain_us, events[2], events[3]));
    taken.chain_us *= 1e3f;
    return taken;
}

float median(std::vector<float> samples) {
    std::sort(samples.begin(), samples.end());
    return samples[samples.size() / 2];
}

void measure(int multiprocessors, long long tile_ns, int priority, const char* name) {
    Streams streams;
    cudaEvent_t events[4];
    CHECK(cudaStreamCreateWithFlags(&streams.compute, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithPriority(&streams.side, cudaStreamNonBlocking, priority));
    for (cudaEvent_t& event : events) CHECK(cudaEventCreate(&event));
    std::vector<float> chains, products;
    for (int i = 0; i < kChains; ++i) {
        const Taken taken = run_once(streams, events, multiprocessors, tile_ns);
        chains.push_back(taken.chain_us);
        products.push_back(taken.product_ms);
    }
    std::printf("%8lld %-9s %10.1f %10.1f %12.3f\n", tile_ns / 1000, name, median(chains),
                *std::max_element(chains.begin(), chains.end()), median(products));
    std::fflush(stdout);
    for (cudaEvent_t event : events) CHECK(cudaEventDestroy(event));
    CHECK(cudaStreamDestroy(streams.side));
    CHECK(cudaStreamDestroy(streams.compute));
}

}  // namespace

int main() {
    int multiprocessors, least, greatest;
    CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CHECK(cudaFuncSetAttribute(product, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kTileSharedBytes));
    std::printf("a chain of 28 us beside a product; medians of %d\n", kChains);
    std::printf("%8s %-9s %10s %10s %12s\n", "tile us", "priority", "chain us", "most us",
                "product ms");
    for (const long long tile_ns : {20'000, 50'000, 100'000, 300'000}) {
        measure(multiprocessors, tile_ns, least, "least");
        measure(multiprocessors, tile_ns, greatest, "greatest");
    }
    return 0;
}
