// Parts of the kernels at limits that no operation of a test can reach.
#include "../../../cuda/ll/bank.cuh"
#include "../ptx_cpu.h"
#include "cases.h"

namespace simt_selftest {
namespace {

using nccl_ep::EntryWord;

// More entries of one expert than an entry can count: the surplus has the last index, which is no
// row's, and stays with its expert.
bool EntriesBeyondTheIndex(uint64_t) {
    constexpr uint32_t kMost = EntryWord::kMaxIndex;
    constexpr uint32_t kExperts = 1u << (32 - EntryWord::kIndexBits);
    bool right = true;
    for (uint32_t expert = 0; expert + 1 < kExperts; ++expert) {
        for (const uint32_t index : {0u, 1u, kMost - 1, kMost, kMost + 1, 2 * kMost, ~0u}) {
            const EntryWord word = EntryWord::here(expert, index);
            right &= word.is_here() && word.expert() == expert;
            right &= word.index() == (index < kMost ? index : kMost);
        }
    }
    return right && !EntryWord::elsewhere().is_here();
}

}  // namespace

std::vector<Case> KernelCases() {
    return {
        {"entries_beyond_the_index", Wanted::kRight, EntriesBeyondTheIndex},
    };
}

}  // namespace simt_selftest
