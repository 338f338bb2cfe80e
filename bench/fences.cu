// What a fence costs beside bulk stores to peers, and what happens without one (docs/development/high-throughput.md).
//
//     nvcc -O3 -std=c++17 -arch=sm_90 bench/fences.cu -o /tmp/fences && /tmp/fences
//
// Needs two or more GPUs that reach each other's memory. One process drives all of them.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cuda_check.h"

namespace {

constexpr uint32_t kRowBytes = 14336;
constexpr uint32_t kSlots = 4096;  // of each sender in each window
constexpr uint32_t kRows = 11087;  // that 4096 tokens send on 4 ranks
constexpr uint32_t kMostWarps = 15;
constexpr uint32_t kFlagStride = 32;

enum class Fence { none, gpu, system };
enum class Wait { read, complete, complete_and_fence };

// ---- PTX ----------------------------------------------------------------------------------------

__device__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ void bulk_store(void* to, const void* from) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                 "cp.async.bulk.commit_group;" ::"l"(to), "r"(shared_address(from)), "r"(kRowBytes)
                 : "memory");
}
__device__ void wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ void wait_complete() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ void make_barrier(uint64_t* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.proxy.async.shared::cta;" ::"r"(
                     shared_address(barrier))
                 : "memory");
}
// Loads a row into shared memory and waits for it; `parity` alternates.
__device__ void load_row(void* to, const void* from, uint64_t* barrier, uint32_t& parity) {
    asm volatile("fence.proxy.async;\n"
                 "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(kRowBytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(kRowBytes), "r"(shared_address(barrier))
        : "memory");
    for (uint32_t done = 0; done == 0;) {
        asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    }
    parity ^= 1;
}

// ---- The cost -----------------------------------------------------------------------------------

struct Cycles {
    unsigned long long fences, sum, most;
};

struct Machine {
    uint8_t* const* windows;
    uint32_t ranks;
    uint32_t rank;

    __device__ uint8_t* slot(uint32_t owner, uint32_t row) const {
        return windows[owner] + (uint64_t{rank} * kSlots + row % kSlots) * kRowBytes;
    }
    __device__ uint32_t peer(uint32_t row) const {
        return (rank + 1 + row % (ranks - 1)) % ranks;
    }
};

// All warps but the last of each block push rows; the last makes fences until they are done.
__global__ void push(Machine machine, const uint8_t* input, Fence fence, Cycles* cycles) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ uint64_t barriers[kMostWarps];
    __shared__ uint32_t done;
    const uint32_t warps = blockDim.x / 32 - 1;
    const uint32_t warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        done = 0;
    }
    __syncthreads();
    if (threadIdx.x % 32 != 0) {
        return;
    }
    if (warp < warps) {
        uint8_t* row = memory + warp * kRowBytes;
        uint32_t parity = 0;
        make_barrier(&barriers[warp]);
        for (uint32_t i = blockIdx.x * warps + warp; i < kRows; i += gridDim.x * warps) {
            load_row(row, input + uint64_t{i % kSlots} * kRowBytes, &barriers[warp], parity);
            bulk_store(machine.slot(machine.peer(i), i), row);
            wait_complete();
        }
        atomicAdd(&done, 1);
        return;
    }
    Cycles mine = {0, 0, 0};
    while (*static_cast<volatile uint32_t*>(&done) < warps) {
        const long long begin = clock64();
        if (fence == Fence::system) {
            fence_system();
        } else if (fence == Fence::gpu) {
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
        }
        const unsigned long long took = clock64() - begin;
        mine = {mine.fences + 1, mine.sum + took, max(mine.most, took)};
        __nanosleep(200);
    }
    cycles[blockIdx.x] = mine;
}

// The opposite: rows are loaded from the peers' windows.
__global__ void pull(Machine machine, uint8_t* output) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ uint64_t barriers[kMostWarps];
    const uint32_t warps = blockDim.x / 32;
    const uint32_t warp = threadIdx.x / 32;
    if (threadIdx.x % 32 != 0) {
        return;
    }
    uint8_t* row = memory + warp * kRowBytes;
    uint32_t parity = 0;
    make_barrier(&barriers[warp]);
    for (uint32_t i = blockIdx.x * warps + warp; i < kRows; i += gridDim.x * warps) {
        wait_read();
        load_row(row, machine.slot(machine.peer(i), i), &barriers[warp], parity);
        bulk_store(output + uint64_t{i % kSlots} * kRowBytes, row);
    }
    wait_complete();
}

// ---- The need -----------------------------------------------------------------------------------

struct Pair {
    uint8_t* slots;  // the receiver's, one row for each warp
    uint32_t* flags;  // the receiver's
    uint32_t* answers;  // the sender's
};

__global__ void send(Pair pair, uint32_t messages, Wait wait) {
    extern __shared__ __align__(128) uint8_t memory[];
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t id = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    auto* row = reinterpret_cast<uint32_t*>(memory + threadIdx.x / 32 * kRowBytes);
    for (uint32_t message = 1; message <= messages; ++message) {
        for (uint32_t i = lane; i < kRowBytes / 4; i += 32) {
            row[i] = message;
        }
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncwarp();
        if (lane == 0) {
            bulk_store(pair.slots + uint64_t{id} * kRowBytes, row);
            if (wait == Wait::read) {
                wait_read();
            } else {
                wait_complete();
            }
            if (wait == Wait::complete_and_fence) {
                fence_system();
            }
            asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(pair.flags + id * kFlagStride),
                         "r"(message)
                         : "memory");
            while (static_cast<volatile uint32_t*>(pair.answers)[id * kFlagStride] != message) {
            }
            wait_complete();
        }
        __syncwarp();
    }
}

__global__ void receive(Pair pair, uint32_t messages, unsigned long long* old_words) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t id = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const auto* row = reinterpret_cast<volatile uint32_t*>(pair.slots + uint64_t{id} * kRowBytes);
    for (uint32_t message = 1; message <= messages; ++message) {
        uint32_t flag = 0;
        while (flag != message) {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                         : "=r"(flag)
                         : "l"(pair.flags + id * kFlagStride)
                         : "memory");
        }
        uint32_t wrong = 0;
        for (uint32_t i = lane; i < kRowBytes / 4; i += 32) {
            wrong += row[kRowBytes / 4 - 1 - i] != message;
        }
        if (wrong != 0) {
            atomicAdd(old_words, wrong);
        }
        __syncwarp();
        if (lane == 0) {
            asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(pair.answers + id * kFlagStride),
                         "r"(message)
                         : "memory");
        }
        __syncwarp();
    }
}

// ---- The host -----------------------------------------------------------------------------------

template <typename Type>
Type* device_memory(size_t count) {
    void* memory = nullptr;
    CHECK(cudaMalloc(&memory, count * sizeof(Type)));
    CHECK(cudaMemset(memory, 0, count * sizeof(Type)));
    CHECK(cudaDeviceSynchronize());
    return static_cast<Type*>(memory);
}

struct Gpu {
    uint8_t* window;
    uint8_t* rows;
    uint8_t** windows;
    Cycles* cycles;
    cudaStream_t stream;
    cudaEvent_t begin, end;
};

std::vector<Gpu> open_gpus() {
    int count = 0;
    CHECK(cudaGetDeviceCount(&count));
    std::vector<Gpu> gpus(count);
    std::vector<uint8_t*> windows;
    for (int i = 0; i < count; ++i) {
        Gpu& gpu = gpus[i];
        CHECK(cudaSetDevice(i));
        for (int peer = 0; peer < count; ++peer) {
            if (peer != i) CHECK(cudaDeviceEnablePeerAccess(peer, 0));
        }
        gpu.window = device_memory<uint8_t>(size_t{kSlots} * kRowBytes * count);
        gpu.rows = device_memory<uint8_t>(size_t{kSlots} * kRowBytes);
        gpu.windows = device_memory<uint8_t*>(count);
        gpu.cycles = device_memory<Cycles>(256);
        CHECK(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
        CHECK(cudaEventCreate(&gpu.begin));
        CHECK(cudaEventCreate(&gpu.end));
        const int shared = kMostWarps * kRowBytes;
        CHECK(cudaFuncSetAttribute(push, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
        CHECK(cudaFuncSetAttribute(pull, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
        CHECK(cudaFuncSetAttribute(send, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
        windows.push_back(gpu.window);
    }
    for (const Gpu& gpu : gpus) {
        CHECK(cudaMemcpy(gpu.windows, windows.data(), count * sizeof(uint8_t*), cudaMemcpyDefault));
    }
    return gpus;
}

// The slowest GPU's microseconds, of four times the least but for the first.
template <typename Launch>
float slowest_us(const std::vector<Gpu>& gpus, Launch launch) {
    float best = 1e9F;
    for (int round = 0; round < 4; ++round) {
        for (size_t i = 0; i < gpus.size(); ++i) {
            CHECK(cudaSetDevice(static_cast<int>(i)));
            CHECK(cudaEventRecord(gpus[i].begin, gpus[i].stream));
            launch(gpus[i], static_cast<uint32_t>(i));
            CHECK(cudaEventRecord(gpus[i].end, gpus[i].stream));
        }
        float slowest = 0;
        for (const Gpu& gpu : gpus) {
            float ms = 0;
            CHECK(cudaEventSynchronize(gpu.end));
            CHECK(cudaEventElapsedTime(&ms, gpu.begin, gpu.end));
            slowest = std::max(slowest, 1000 * ms);
        }
        best = round == 0 ? best : std::min(best, slowest);
    }
    return best;
}

void print_costs(const std::vector<Gpu>& gpus) {
    const auto ranks = static_cast<uint32_t>(gpus.size());
    const uint32_t shared = kMostWarps * kRowBytes;
    for (const uint32_t blocks : {8U, 11U, 14U, 24U, 60U}) {
        for (const Fence fence : {Fence::none, Fence::gpu, Fence::system}) {
            const float us = slowest_us(gpus, [&](const Gpu& gpu, uint32_t rank) {
                push<<<blocks, 32 * (kMostWarps + 1), shared, gpu.stream>>>(
                    {gpu.windows, ranks, rank}, gpu.rows, fence, gpu.cycles);
            });
            Cycles cycles;
            CHECK(cudaMemcpy(&cycles, gpus[0].cycles, sizeof(cycles), cudaMemcpyDefault));
            const char* const names[] = {"none", "gpu", "system"};
            std::printf("push, %2u SMs, fence %-6s %6.1f us; a fence %6llu cycles, at most %6llu\n",
                        blocks, names[static_cast<int>(fence)], us,
                        cycles.sum / std::max(cycles.fences, 1ULL), cycles.most);
        }
        const float us = slowest_us(gpus, [&](const Gpu& gpu, uint32_t rank) {
            pull<<<blocks, 32 * kMostWarps, shared, gpu.stream>>>({gpu.windows, ranks, rank},
                                                                 gpu.rows);
        });
        std::printf("pull, %2u SMs %20.1f us\n", blocks, us);
    }
}

void print_need(const std::vector<Gpu>& gpus) {
    constexpr uint32_t kBlocks = 40;
    constexpr uint32_t kWarps = 11;
    constexpr size_t kWords = size_t{kBlocks} * kWarps * kFlagStride;
    for (const Wait wait : {Wait::read, Wait::complete, Wait::complete_and_fence}) {
        const uint32_t messages = wait == Wait::read ? 2000 : 20000;
        CHECK(cudaSetDevice(0));
        uint32_t* answers = device_memory<uint32_t>(kWords);
        CHECK(cudaSetDevice(1));
        const Pair pair = {gpus[1].window, device_memory<uint32_t>(kWords), answers};
        auto* old_words = device_memory<unsigned long long>(1);
        receive<<<kBlocks, 32 * kWarps, 0, gpus[1].stream>>>(pair, messages, old_words);
        CHECK(cudaSetDevice(0));
        send<<<kBlocks, 32 * kWarps, kWarps * kRowBytes, gpus[0].stream>>>(pair, messages, wait);
        CHECK(cudaStreamSynchronize(gpus[0].stream));
        CHECK(cudaStreamSynchronize(gpus[1].stream));
        unsigned long long old = 0;
        CHECK(cudaMemcpy(&old, old_words, sizeof(old), cudaMemcpyDefault));
        const char* const names[] = {"waits for the read", "waits for completion",
                                     "waits for completion and fences"};
        std::printf("sender %s: %u messages of each warp, %llu old words\n",
                    names[static_cast<int>(wait)], messages, old);
    }
}

}  // namespace

int main() {
    const std::vector<Gpu> gpus = open_gpus();
    if (gpus.size() < 2) {
        std::printf("needs two GPUs\n");
        return 0;
    }
    print_costs(gpus);
    print_need(gpus);
    return 0;
}
