// Rank-major low-latency dispatch: every row goes once to each rank that hosts one of its token's experts, and is
// copied there to the next row of its source, with the token's ids and weights beside it.
//
// Rows travel as in ll_dispatch, through the same bank, and so does what is told of each entry: its local expert, and
// instead of an index among the rows of the expert that among the rows from the source. A source tells one count, and
// the weights to the ranks that get the token's row, in packets of their own. Grid, phases, nodes: as in dispatch.cu.
//
// At the end `out`, the ids and the weights hold what came, all ids of other rows are -1, `counter` has the rows from
// each source, and the handle's memory what combine needs.

#include "../base/entry.cuh"
#include "dispatch_run.cuh"
#include "rank_receive.cuh"

namespace nccl_ep::ll_rank_dispatch_impl {

using namespace ll_dispatch_impl;

template <typename Nodes, typename Rows>
__device__ __forceinline__ void run(const LlRankDispatchParams& params, const Nodes& nodes, const Rows& rows) {
    using Op = DispatchOperation<Nodes, Rows, RankMajor>;
    const LlBeside& beside = params.beside;
    ll_dispatch_impl::run<Op>(
        params.dispatch, nodes, rows,
        [&](const Block<Op>& block, const typename Op::Source& source, const BlockOf& part) {
            notify_by_rank(block, beside, source, part, [] { return true; });
        },
        [&](const Block<Op>& block) {
            hear_all(block, beside);
            receive_rows(block, [&](const UnitOfAll& unit, Late& late) {
                return receive_chunk(block, beside, unit, late, [&](auto&&... what) {
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
