// Device memory of one player. Every shape that a player draws is smaller than a slot or breaks a
// rule, so whatever the library accepts fits.
#pragma once

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
    Memory(unsigned num_ranks, uint64_t seed);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    void* At(Slot slot) const { return base_ + slot * slot_bytes_; }
    size_t slot_bytes() const { return slot_bytes_; }
    // The ids of the handle with this index.
    void* IdsOf(unsigned handle) const;
    // Mapped host memory for a counter.
    void* host_counter() const { return host_counter_; }

    // Draws new ids, the same expert at `most` so often; `stream` and all others must be idle.
    void DrawIds(unsigned handle, unsigned num_experts, unsigned most, uint64_t seed, cudaStream_t stream) const;

    // Fills all outputs with a pattern; the other function says whether it is still there. Streams must be idle.
    void MarkOutputs(cudaStream_t stream) const;
    bool OutputsAreMarked(cudaStream_t stream);

   private:
    static constexpr size_t kIdsBytes = kMostTokens * (kMostTopK + 1) * sizeof(int64_t);
    size_t slot_bytes_;
    unsigned char* base_;
    unsigned char* ids_;
    void* host_counter_ = nullptr;
    std::vector<unsigned char> copy_;  // of the outputs
};

}  // namespace test_fuzz
