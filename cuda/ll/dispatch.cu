// Low-latency dispatch: every row is sent once to each rank that hosts one of its token's experts, and copied there to
// the token's rows of the output (../layout).
//
// Grid: any number of blocks that fit on the GPU at once. Sending blocks send rows. The first receiving blocks, the
// notifiers, count this rank's entries and notify the peers, in packets, of how many rows each expert gets from this
// rank and which index each (token, k) has among them. All receiving blocks compute from the ranks' counts where each
// source's rows begin; then their warps wait for arriving chunks and copy them to the output.
//
// There are as many senders and notifiers as this rank's tokens need. There are enough receivers for the most tokens
// that any rank may have, as the numbers of the other ranks are not known at launch; receivers without a chunk end when
// they have the counts, which costs little (docs/performance.md, Uneven tokens).
//
// Over several nodes (nodes.cuh) a rank does all this for each of its sources: it sends their rows, which came over the
// network, to the peers, and notifies the peers. Receivers see no difference.
//
// At the end `out` has the rows, `counter` the rows per expert, and the handle's memory what a combine needs.

#include "../base/entry.cuh"
#include "dispatch_run.cuh"

namespace nccl_ep::ll_dispatch_impl {

template <typename Nodes, typename Rows>
__device__ __forceinline__ void run(const LlDispatchParams& params, const Nodes& nodes,
                                    const Rows& rows) {
    using Op = DispatchOperation<Nodes, Rows>;
    run<Op>(
        params, nodes, rows,
        [](const Block<Op>& block, const typename Op::Source& source, const SourceShare& part) {
            notify(block, source, part);
        },
        [](const Block<Op>& block) {
            find_begins(block);
            receive_rows(block, [&](const WorkUnit& unit, LateWait& late) { return receive_chunk(block, unit, late); });
        });
}

template <typename Rows>
__device__ __forceinline__ void run_scaled(const LlScaledDispatchParams& params) {
    follow_grid();
    run(params.dispatch, OneNode{params.dispatch.common.peers}, Rows{params.rows});
}

ENTRY(ll_dispatch) {
    follow_grid();
    run(params, OneNode{params.common.peers}, PlainRows{});
}
ENTRY(ll_dispatch_scaled) { run_scaled<ForwardedRows<>>(params); }
ENTRY_BY_TYPE(ll_dispatch_cast, run_scaled<CastRows<T>>(params))
ENTRY(ll_dispatch_nodes) {
    run(params.dispatch, SeveralNodes<TwoSided>{params.nodes, false}, PlainRows{});
}
ENTRY(ll_dispatch_nodes_scaled) {
    run(params.dispatch, SeveralNodes<TwoSided>{params.nodes, false}, PackedRows{params.rows});
}

}  // namespace nccl_ep::ll_dispatch_impl
