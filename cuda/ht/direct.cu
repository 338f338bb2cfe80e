// High-throughput dispatch in groups with objects: if all ranks offer their outputs, rows are stored directly to them,
// else they go through rings (offers.cuh).
//
// Grid: as through rings; direct rows are sent by warps of the first blocks.

#include "../base/entry.cuh"
#include "direct_rows.cuh"
#include "dispatch_run.cuh"

namespace nccl_ep::ht_direct_impl {

template <typename Rows>
__device__ void run(const HtDispatchParams& params, const HtMapped& mapped, const Rows& rows) {
    DYNAMIC_SHARED(uint8_t, memory);
    SharedOffers& offers = *reinterpret_cast<SharedOffers*>(memory);
    const auto has_room = [&](uint32_t total) {
        return params.out_rows >= total && rows.scale_rows() >= total && params.routing_rows >= total;
    };
    const Agreement agreement = agree(params.common, mapped, has_room, offers, [] {});
    __syncthreads();
    if (agreement.path == RowPath::kDirect) {
        run(Block<Rows>{params, mapped, rows, offers}, memory + HT_MAPPED_SHARED_BYTES);
    } else if (agreement.path == RowPath::kRings) {
        ht_dispatch_impl::run(params, AllRows{}, rows);
        wait_for_all_offers(params.common, mapped, agreement);
    }
}

ENTRY(ht_dispatch_direct) { run(params.rows, params.mapped, PlainRows{}); }
ENTRY(ht_dispatch_direct_scaled) { run(params.rows.rows, params.mapped, ForwardedRows{params.rows.scaled}); }

}  // namespace nccl_ep::ht_direct_impl
