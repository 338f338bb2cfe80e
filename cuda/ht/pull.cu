// High-throughput combine in groups with objects: if all ranks offer their inputs, homes load the experts' rows
// directly from them, else the rows come through rings (offers.cuh).
//
// Grid: as through rings; rows that are loaded directly are summed by all blocks.

#include "../base/entry.cuh"
#include "combine_run.cuh"
#include "pull_rows.cuh"

namespace nccl_ep::ht_pull_impl {

// A warp adds to `waits` how long each rank's offer takes to arrive.
__device__ __noinline__ static void time_offers(const HtCommon& common, const HtMapped& mapped, uint32_t epoch,
                                                uint64_t* waits) {
    const uint64_t begin = globaltimer_ns();
    wait_for_ranks(
        common.peers.ranks, [&](uint32_t rank) { return rank != common.peers.rank && is_active(common.peers, rank); },
        [&](uint32_t rank) {
            const uint64_t* offer = offer_in<Own>(common, mapped, own_window(common.peers), rank, epoch);
            const bool has_come = packet_epoch(ld_relaxed_sys(offer)) == epoch;
            if (has_come) {
                add_wait(waits, rank, begin);
            }
            return has_come;
        },
        [&](uint32_t rank, uint64_t start) { return keep_waiting(common, {WAIT_BEGIN, rank, epoch}, start, 0); });
}

template <typename Type>
__device__ void run(const HtPullParams& params) {
    DYNAMIC_SHARED(uint8_t, memory);
    SharedOffers& offers = *reinterpret_cast<SharedOffers*>(memory);
    const HtCommon& common = params.rows.common;
    const auto has_room = [&](uint32_t total) { return params.rows.in_rows >= total; };
    uint64_t* const waits = params.rows.waits;
    const auto watch = [&] {
        if (waits != nullptr && blockIdx.x == 0 && warp_idx() == num_warps() - 1) {
            time_offers(common, params.mapped, offers.epoch, waits);
        }
    };
    const Agreement agreement = agree(common, params.mapped, has_room, offers, watch);
    __syncthreads();
    if (agreement.path == RowPath::kDirect) {
        run<Type>(Block{params.rows, params.mapped, offers}, offers, memory + HT_MAPPED_SHARED_BYTES);
    } else if (agreement.path == RowPath::kRings) {
        ht_combine_impl::run<Type>(params.rows, AllRows{}, NoPartials{}, SummedRows{});
        wait_for_all_offers(common, params.mapped, agreement);
    }
}

ENTRY_BY_TYPE(ht_combine_pull, run<T>(params))

}  // namespace nccl_ep::ht_pull_impl
