// The offers of a rank whose operation has to use rings: it offers no tensor, so all ranks use rings.
//
// Grid: one block, a thread for each rank. The operation follows as a kernel of its own.

#include "../base/entry.cuh"
#include "offers.cuh"

namespace nccl_ep::ht_offer_impl {

ENTRY(ht_offer) {
    __shared__ uint64_t memory[HT_MAPPED_SHARED_BYTES / sizeof(uint64_t)];
    Agreed& agreed = *reinterpret_cast<Agreed*>(memory);
    // The operation itself finds out what there is no room for.
    const Agreement agreement = agree(params.common, params.mapped, [](uint32_t) { return true; }, agreed, [] {});
    if (agreed.failure == 0 && (agreed.total & HT_DISAGREED) == 0) {
        hear_all(params.common, params.mapped, agreement);
    }
}

}  // namespace nccl_ep::ht_offer_impl
