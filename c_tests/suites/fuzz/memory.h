// Device memory of one player. Every shape that a player draws is smaller than a slot or breaks a
// rule, so whatever the library accepts fits.
#pragma once

#include <algorithm>
#include <climits>
#include <vector>

#include "harness/dice.hpp"

namespace test_fuzz {

// Largest values that are drawn; they bound the memory.
constexpr unsigned kMostTokens = 8;
constexpr unsigned kMostLocalExperts = 3;
constexpr unsigned kMostRowBytes = 256;
constexpr unsigned kMostTopK = 32;
constexpr unsigned kSpareRows = 4;
constexpr unsigned kMostHandles = 6;

enum Slot : unsigned {
    kTokensIn,
    kIdsIn,
    kWeightsIn,
    kResultsIn,
    kGradientsIn,
    kScalesIn,
    kFirstOutput,
    kReceived = kFirstOutput,
    kReceivedIds,
    kReceivedWeights,
    kCombined,
    kGradientsOut,
    kReceivedScales,
    kCounter,
    kNumSlots,
};

class Memory {
   public:
    Memory(unsigned num_ranks, uint64_t seed)
        : slot_bytes_(SlotBytes(num_ranks)),
          base_(static_cast<unsigned char*>(ep_device_alloc(kNumSlots * slot_bytes_))),
          ids_(static_cast<unsigned char*>(ep_device_alloc(kMostHandles * kIdsBytes))) {
        EP_REQUIRE_CUDA(cudaHostAlloc(&host_counter_, kCounterBytes, cudaHostAllocMapped));
        std::vector<uint64_t> noise(kNumSlots * slot_bytes_ / sizeof(uint64_t));
        for (uint64_t& word : noise) word = ep_random(&seed);
        ep_upload(base_, noise.data(), noise.size() * sizeof(uint64_t));
        EP_REQUIRE_CUDA(cudaMemset(ids_, 0, kMostHandles * kIdsBytes));
        EP_REQUIRE_CUDA(cudaDeviceSynchronize());
    }

    ~Memory() {
        ep_device_free(base_);
        ep_device_free(ids_);
        EP_REQUIRE_CUDA(cudaFreeHost(host_counter_));
    }

    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    void* At(Slot slot) const { return base_ + slot * slot_bytes_; }
    size_t slot_bytes() const { return slot_bytes_; }
    // The ids of the handle with this index.
    void* IdsOf(unsigned handle) const { return ids_ + handle * kIdsBytes; }
    // Mapped host memory for a counter.
    void* host_counter() const { return host_counter_; }

    // Draws new ids, the same expert at `most` so often; `stream` and all others must be idle.
    void DrawIds(unsigned handle, unsigned num_experts, unsigned most, uint64_t seed, cudaStream_t stream) const {
        static const int64_t kOdd[] = {-1, -2, INT64_MIN, INT64_MAX, INT_MIN, 1LL << 31, 1LL << 32, (1LL << 32) + 1};
        ep::Dice dice(seed);
        std::vector<int64_t> ids(kIdsBytes / sizeof(int64_t));
        const unsigned odd_one_in = dice.Between(2, 40);
        std::vector<unsigned> drawn(num_experts + 1);
        for (int64_t& id : ids) {
            const unsigned expert = dice.Below(num_experts + 1);
            const bool is_odd = dice.OneIn(odd_one_in) || drawn[expert]++ >= most;
            id = is_odd ? dice.Pick(kOdd) : static_cast<int64_t>(expert);
        }
        EP_REQUIRE_CUDA(cudaMemcpyAsync(IdsOf(handle), ids.data(), kIdsBytes, cudaMemcpyHostToDevice, stream));
        EP_REQUIRE_CUDA(cudaStreamSynchronize(stream));
    }

    // Fills all outputs with a pattern; the other function says whether it is still there. Streams must be idle.
    void MarkOutputs(cudaStream_t stream) const {
        const size_t bytes = (kNumSlots - kFirstOutput) * slot_bytes_;
        EP_REQUIRE_CUDA(cudaMemsetAsync(At(kFirstOutput), kMark, bytes, stream));
        EP_REQUIRE_CUDA(cudaStreamSynchronize(stream));
    }

    bool OutputsAreMarked(cudaStream_t stream) {
        copy_.resize((kNumSlots - kFirstOutput) * slot_bytes_);
        EP_REQUIRE_CUDA(cudaMemcpyAsync(copy_.data(), At(kFirstOutput), copy_.size(), cudaMemcpyDeviceToHost, stream));
        EP_REQUIRE_CUDA(cudaStreamSynchronize(stream));
        return std::all_of(copy_.begin(), copy_.end(), [](unsigned char b) { return b == kMark; });
    }

   private:
    static constexpr unsigned char kMark = 0x5e;
    static constexpr size_t kCounterBytes = 256;
    static constexpr size_t kIdsBytes = kMostTokens * (kMostTopK + 1) * sizeof(int64_t);

    // Each slot has spare room at its end, for addresses that were moved.
    static size_t SlotBytes(unsigned num_ranks) {
        constexpr size_t kAlignment = 4096;
        const size_t rows = static_cast<size_t>(num_ranks) * kMostTokens;
        const size_t experts = kMostLocalExperts * rows * kMostRowBytes;
        const size_t columns = (rows + kSpareRows) * (kMostTopK + 1) * sizeof(int64_t);
        return (std::max(experts, columns) / kAlignment + 2) * kAlignment;
    }

    size_t slot_bytes_;
    unsigned char* base_;
    unsigned char* ids_;
    void* host_counter_ = nullptr;
    std::vector<unsigned char> copy_;  // of the outputs
};

}  // namespace test_fuzz
