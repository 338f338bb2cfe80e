// Low-latency combine: each token's rows return from the ranks of its experts and are summed with the token's weights.
//
// Grid: any number of blocks that fit on the GPU at once. There are three kinds of work, each in units that warps take
// in turn: the home rank of a token sends its weights to the expert ranks; an expert rank sends one row per token (in
// exact mode one per entry) to the home; the home sums. There are enough sending blocks for the most tokens that any
// rank may have, as the numbers of the other ranks are not known at launch.
//
// Which row an id means: entry k has a current id, and means the row that the dispatch sent for the same id of the
// token, whatever its k was then (topk_weights.cuh).
//
// Order of summation. An expert rank that a token names once sends the expert's row as it is; one that it names more
// often sends round(p), p = 0; p = fma(w[j], y[j], p) for its entries j ascending, as the dispatch had them. Home: a =
// 0; for expert ranks ascending: a = fma(w[j], y, a) for a row sent as it is, a = a + y for a sum; then out = round(a).
// In exact mode all rows are sent as they are and a = fma(w[k], y[k], a) for k ascending, as the combine has them. All
// sums are in fp32, "round" is to nearest even in the type of the rows. An entry that the dispatch dropped counts as a
// row of zeros. An entry that no id means any more (it was masked since the dispatch) is sent, but not added.
//
// Over several nodes the forwarder of a token's rank stands for its home on each other node: weights come over the
// network, the node's sum a is rounded and goes home as one row. The home begins with the a of its own node, not
// rounded, and adds the rows of the node before it, of the one before that, and so on around the ring.

#include "../base/entry.cuh"
#include "combine_run.cuh"
#include "combine_send.cuh"

namespace nccl_ep::ll_combine_impl {

template <typename Type, typename SizeOfUnits, bool Exact, typename Nodes>
__device__ __forceinline__ void run(const LlCombineParams& params, const Nodes& nodes) {
    using Op = CombineOperation<Nodes, SizeOfUnits, Exact>;
    run<Type, Op>(
        params, nodes,
        [](const Block<Op>& block) {
            if constexpr (!Exact) {  // in exact mode only the home needs weights
                send_weights(block, block.receivers);
            }
        },
        [](const Block<Op>& block, const WorkUnit& outgoing) {
            send_unit<Type>(block, outgoing, row_of_lane(block, outgoing.rank, outgoing.token));
        });
}

template <typename Type, typename SizeOfUnits, bool Exact = false>
__device__ __forceinline__ void run(const LlCombineParams& params) {
    follow_grid();
    run<Type, SizeOfUnits, Exact>(params, OneNode{params.common.peers});
}

template <typename Type>
__device__ __forceinline__ void run(const LlCombineNodesParams& params) {
    run<Type, FewTokens, false>(params.combine, SeveralNodes<TwoSided>{params.nodes, true});
}

ENTRY_BY_TYPE(ll_combine, run<T, FewTokens>(params))
ENTRY_BY_TYPE(ll_combine_many, run<T, ManyTokens>(params))
ENTRY_BY_TYPE(ll_combine_exact, run<T, AllEntries, true>(params))
ENTRY_BY_TYPE(ll_combine_nodes, run<T>(params))

}  // namespace nccl_ep::ll_combine_impl
