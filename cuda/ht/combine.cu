// High-throughput combine: the rows that a dispatch has delivered return to their home ranks, which sum the rows of
// each token.
//
// Grid: sending blocks, then receiving blocks, no more than fit on the GPU at once. A sending warp takes a row for any
// home whose ring has a free slot, and copies it there through its staging buffer; one more warp of the block, the
// notifier, notifies the homes. A receiving warp takes a token, waits for its rows, sums them directly from the rings,
// and gives their credits. This rank's own rows are read in place.
//
// Order of summation: a = 0; for expert ranks ascending: a = a + y; then out = round(a); in fp32. Over several nodes
// the sums of the other nodes are added next (partials.cuh). Gradients of weights, if any, travel behind the row; the
// home stores them by ascending expert.

#include "../base/entry.cuh"
#include "combine_run.cuh"

namespace nccl_ep::ht_combine_impl {

template <typename Type>
__device__ void run(const HtCombineParams& params) {
    run<Type>(params, AllRows{}, NoPartials{}, SummedRows{});
}

template <typename Type>
__device__ void run(const HtCombineNodesParams& params) {
    run<Type>(params.of_node, RowsOfStage<TwoSided>{params.stage}, NodePartials{params.partials},
              SummedRows{});
}

ENTRY_BY_TYPE(ht_combine, run<T>(params))
ENTRY_BY_TYPE(ht_combine_nodes, run<T>(params))

}  // namespace nccl_ep::ht_combine_impl
