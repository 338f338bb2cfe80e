#include "suites/fuzz/memory.h"

#include <algorithm>
#include <climits>

namespace test_fuzz {
namespace {

constexpr unsigned char kMark = 0x5e;
constexpr size_t kCounterBytes = 256;

// Each slot has spare room at its end, for addresses that were moved.
size_t SlotBytes(unsigned num_ranks) {
    constexpr size_t kAlignment = 4096;
    const size_t rows = static_cast<size_t>(num_ranks) * kMostTokens;
    const size_t experts = kMostLocalExperts * rows * kMostRowBytes;
    const size_t columns = (rows + kSpareRows) * (kMostTopK + 1) * sizeof(int64_t);
    return (std::max(experts, columns) / kAlignment + 2) * kAlignment;
}

}  // namespace

Memory::Memory(unsigned num_ranks, uint64_t seed)
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

Memory::~Memory() {
    ep_device_free(base_);
    ep_device_free(ids_);
    EP_REQUIRE_CUDA(cudaFreeHost(host_counter_));
}

void* Memory::IdsOf(unsigned handle) const { return ids_ + handle * kIdsBytes; }

void Memory::DrawIds(unsigned handle, unsigned num_experts, unsigned most, uint64_t seed, cudaStream_t stream) const {
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

void Memory::MarkOutputs(cudaStream_t stream) const {
    const size_t bytes = (kNumSlots - kFirstOutput) * slot_bytes_;
    EP_REQUIRE_CUDA(cudaMemsetAsync(At(kFirstOutput), kMark, bytes, stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(stream));
}

bool Memory::OutputsAreMarked(cudaStream_t stream) {
    copy_.resize((kNumSlots - kFirstOutput) * slot_bytes_);
    EP_REQUIRE_CUDA(cudaMemcpyAsync(copy_.data(), At(kFirstOutput), copy_.size(), cudaMemcpyDeviceToHost, stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(stream));
    return std::all_of(copy_.begin(), copy_.end(), [](unsigned char b) { return b == kMark; });
}

}  // namespace test_fuzz
