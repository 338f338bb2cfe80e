// Rank-major low-latency dispatch: every row is sent once to each rank that hosts one of its token's experts, and
// copied there to the next row of its source, with the token's ids and weights beside it.
//
// Rows and entries travel as in ll_dispatch, through the same bank, except that the index of an entry is that among the
// rows from the source, not among those of the expert. A source sends each peer a single count, and sends weights, in
// packets of their own, to the ranks that get the token's row. Grid, phases and nodes are as in dispatch.cu.
//
// At the end `out`, the ids and the weights have what came, the ids of unused rows are -1, `counter` has the rows from
// each source, and the handle's memory what a combine needs.

#include "../base/entry.cuh"
#include "dispatch_run.cuh"
#include "rank_receive.cuh"

namespace nccl_ep::ll_rank_dispatch_impl {

using namespace ll_dispatch_impl;

template <typename Nodes, typename Rows>
__device__ __forceinline__ void run(const LlRankDispatchParams& params, const Nodes& nodes, const Rows& rows) {
    using Op = DispatchOperation<Nodes, Rows, RankMajor>;
    const LlTopk& topk = params.topk;
    ll_dispatch_impl::run<Op>(
        params.dispatch, nodes, rows,
        [&](const Block<Op>& block, const typename Op::Source& source, const SourceShare& part) {
            notify_by_rank(block, topk, source, part, [] { return true; });
        },
        [&](const Block<Op>& block) {
            receive_counts_and_clear(block, topk);
            receive_rows(block, [&](const WorkUnit& unit, LateWait& late) {
                return receive_chunk(block, topk, unit, late, [&](auto&&... what) {
                    return receive(block, unit, what...);
                });
            });
        });
}

template <typename Rows>
__device__ __forceinline__ void run_scaled(const LlRankScaledDispatchParams& params) {
    follow_grid();
    run(params.dispatch, OneNode{params.dispatch.dispatch.common.peers}, Rows{params.rows});
}

ENTRY(ll_rank_dispatch) {
    follow_grid();
    run(params, OneNode{params.dispatch.common.peers}, PlainRows{});
}
ENTRY(ll_rank_dispatch_scaled) { run_scaled<ForwardedRows<>>(params); }
ENTRY_BY_TYPE(ll_rank_dispatch_cast, run_scaled<CastRows<T>>(params))
ENTRY(ll_rank_dispatch_nodes) { run(params.dispatch, SeveralNodes<TwoSided>{params.nodes, false}, PlainRows{}); }
ENTRY(ll_rank_dispatch_nodes_scaled) {
    run(params.dispatch, SeveralNodes<TwoSided>{params.nodes, false}, PackedRows{params.rows});
}

}  // namespace nccl_ep::ll_rank_dispatch_impl
