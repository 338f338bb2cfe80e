// The offers of a rank whose operation has to use rings: it offers no tensor, so all ranks use rings. The operation
// follows as another kernel.
//
// Grid: one block, one thread per rank.

#include "../base/entry.cuh"
#include "offers.cuh"

namespace nccl_ep::ht_offer_impl {

ENTRY(ht_offer) {
    __shared__ uint64_t memory[HT_MAPPED_SHARED_BYTES / sizeof(uint64_t)];
    SharedOffers& offers = *reinterpret_cast<SharedOffers*>(memory);
    // The operation itself reports outputs that are too small.
    const Agreement agreement = agree(params.common, params.mapped, [](uint32_t) { return true; }, offers, [] {});
    if (offers.failure == 0 && (offers.total & HT_DISAGREED) == 0) {
        wait_for_all_offers(params.common, params.mapped, agreement);
    }
}

}  // namespace nccl_ep::ht_offer_impl
