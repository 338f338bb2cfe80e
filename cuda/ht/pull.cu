// High-throughput combine in groups with objects: the ranks make offers, and homes load the experts' rows from where
// they lie, or these come through rings (offers.cuh).
//
// Grid: as through rings; rows that lie in objects are summed by all blocks.

#include "../base/entry.cuh"
#include "combine_run.cuh"
#include "pull_rows.cuh"

namespace nccl_ep::ht_pull_impl {

template <typename Type>
__device__ void run(const HtPullParams& params) {
    DYNAMIC_SHARED(uint8_t, memory);
    Agreed& agreed = *reinterpret_cast<Agreed*>(memory);
    const HtCommon& common = params.rows.common;
    const auto has_room = [&](uint32_t total) { return params.rows.in_rows >= total; };
    const Agreement agreement = agree(common, params.mapped, has_room, agreed);
    __syncthreads();
    if (agreement.way == Way::kStraight) {
        run<Type>(Block{params.rows, params.mapped, agreed}, agreed, memory + HT_MAPPED_SHARED_BYTES);
    } else if (agreement.way == Way::kRings) {
        ht_combine_impl::run<Type>(params.rows, AllRows{}, NoPartials{}, SummedRows{});
        hear_all(common, params.mapped, agreement);
    }
}

ENTRY(ht_combine_pull_bf16) { run<Bf16>(params); }
ENTRY(ht_combine_pull_f16) { run<F16>(params); }
ENTRY(ht_combine_pull_f32) { run<F32>(params); }

}  // namespace nccl_ep::ht_pull_impl
