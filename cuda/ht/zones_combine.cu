// High-throughput combine of rows that lie by expert in the input. As combine.cu, but a sending warp sums the slots of
// a row, rounds the sum and sends that, and the own rank's part of a token is such a sum as well.

#include "../base/entry.cuh"
#include "combine_run.cuh"
#include "zoned_input.cuh"

namespace nccl_ep::ht_combine_impl {

template <typename Type>
__device__ void run(const HtZonesCombineParams& params) {
    run<Type>(params.rows, AllRows{}, NoPartials{}, ZonedInput<Type>{params.zones});
}

template <typename Type>
__device__ void run(const HtZonesCombineNodesParams& params) {
    run<Type>(params.rows.of_node, RowsOfStage<TwoSided>{params.rows.stage}, NodePartials{params.rows.partials},
              ZonedInput<Type>{params.zones});
}

ENTRY_BY_TYPE(ht_combine_zones, run<T>(params))
ENTRY_BY_TYPE(ht_combine_zones_nodes, run<T>(params))

}  // namespace nccl_ep::ht_combine_impl
