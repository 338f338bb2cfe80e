// Memory of tensors. With several threads it comes from a pool: freeing device memory waits for all
// streams, so ranks would have to free in one agreed order, which threads cannot keep.
#include <mutex>
#include <vector>

#include "suites/fuzz/player.h"

namespace test_fuzz {
namespace {

thread_local Fails t_fails = Fails::kNot;

bool Refuses(void** data, cudaError_t* result) {
    if (t_fails == Fails::kNot) return false;
    *result = t_fails == Fails::kWithError ? cudaErrorMemoryAllocation : cudaSuccess;
    *data = nullptr;
    return true;
}

cudaError_t Allocate(void** data, size_t bytes) {
    cudaError_t result = cudaSuccess;
    if (Refuses(data, &result)) return result;
    result = ep_counted_alloc(data, bytes);
    if (result != cudaSuccess) (void)cudaGetLastError();
    return result;
}

class Pool {
   public:
    void* Take(size_t bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (bytes > kBlockBytes) return nullptr;
        if (base_ == nullptr) {
            base_ = static_cast<unsigned char*>(ep_device_alloc(kBlocks * kBlockBytes));
            for (size_t i = 0; i < kBlocks; ++i) free_.push_back(base_ + i * kBlockBytes);
        }
        if (free_.empty()) return nullptr;
        void* block = free_.back();
        free_.pop_back();
        return block;
    }
    void Give(void* block) {
        const std::lock_guard<std::mutex> lock(mutex_);
        free_.push_back(block);
    }

   private:
    static constexpr size_t kBlockBytes = 65536;
    static constexpr size_t kBlocks = 64;
    std::mutex mutex_;
    unsigned char* base_ = nullptr;  // never freed
    std::vector<void*> free_;
};

Pool g_pool;

cudaError_t TakeFromPool(void** data, size_t bytes) {
    cudaError_t result = cudaSuccess;
    if (Refuses(data, &result)) return result;
    *data = g_pool.Take(bytes);
    return *data != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t GiveToPool(void* data) {
    g_pool.Give(data);
    return cudaSuccess;
}

}  // namespace

void NextAllocation(Fails fails) { t_fails = fails; }

Allocators AnyAllocators(Dice& dice, bool threads) {
    if (threads) return {TakeFromPool, GiveToPool};
    const unsigned kind = dice.Below(4);
    return {kind % 2 == 0 ? nullptr : Allocate, kind / 2 == 0 ? nullptr : ep_counted_free};
}

}  // namespace test_fuzz
