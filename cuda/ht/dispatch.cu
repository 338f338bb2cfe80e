// High-throughput dispatch: every row is sent once to each rank that hosts one of its token's experts, into a ring
// there, and copied from the ring to its row of the output.
//
// Grid: sending blocks, then receiving blocks, no more than fit on the GPU at once; every warp with a staging buffer
// works independently. A sending warp takes a token, loads its row once and stores it to the rings of all its peers; if
// it casts the row, it also stores it to this rank's output, even if the row goes nowhere else. One more warp of the
// block, the notifier, notifies the peers. In a receiving block one warp polls for arrivals. Each of the others has
// rows of its own: it takes any of them that has arrived, gives the credit as soon as the row is in shared memory, and
// stores the row to the output: by ascending source, then token. Ids and weights, if any, travel behind the row. While
// nothing has arrived, receivers do local work: rows of this rank's tokens for its own experts, and output rows that no
// token fills, which get zeros and ids of -1.

#include "../base/entry.cuh"
#include "cast_rows.cuh"
#include "dispatch_run.cuh"

namespace nccl_ep::ht_dispatch_impl {

template <typename Rows>
__device__ void run(const HtScaledDispatchParams& params) {
    run(params.rows, AllRows{}, Rows{params.scaled});
}

template <typename Rows>
__device__ void run(const HtScaledDispatchNodesParams& params) {
    run(params.of_node.rows, RowsOfStage<TwoSided>{params.stage}, Rows{params.of_node.scaled});
}

ENTRY(ht_dispatch) { run(params, AllRows{}, PlainRows{}); }
ENTRY(ht_dispatch_scaled) { run<ForwardedRows>(params); }
ENTRY(ht_dispatch_cast) { run<CastRows>(params); }
ENTRY(ht_dispatch_nodes) { run(params.of_node, RowsOfStage<TwoSided>{params.stage}, PlainRows{}); }
ENTRY(ht_dispatch_nodes_scaled) { run<ForwardedRows>(params); }
ENTRY(ht_dispatch_nodes_cast) { run<CastRows>(params); }

}  // namespace nccl_ep::ht_dispatch_impl
