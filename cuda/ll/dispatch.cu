// Low-latency dispatch: every row goes once to each rank that hosts one of its token's experts, and is
// copied there to the rows of the output that the token takes (../layout).
//
// Grid: any number of blocks that fit on the GPU at once. Sending blocks send rows. The first receiving blocks, the
// notifiers, count this rank's entries and notify the peers, in packets that carry their epoch, how many rows each
// expert gets from here and which index each (token, k) has among them. All receiving blocks compute from the peers'
// counts where each source's rows begin; then their warps wait for arriving chunks and copy them out.
//
// Senders and notifiers are as many as this rank's tokens need. Receivers are enough for the most tokens
// that any rank may have, as nobody knows at the launch how many the others have; those without a chunk
// end when they have heard it, which costs little (docs/performance.md, Uneven tokens).
//
// Over several nodes (nodes.cuh) a rank does all this for each of its sources: it sends their rows, which came
// over the network, to the peers, and notifies these. Receivers see no difference.
//
// At the end `out` holds the rows, `counter` the rows per expert, and the handle's memory what combine
// needs.

#include "../base/entry.cuh"
#include "dispatch_run.cuh"

namespace nccl_ep::ll_dispatch_impl {

template <typename Nodes, typename Rows>
__device__ __forceinline__ void run(const LlDispatchParams& params, const Nodes& nodes,
                                    const Rows& rows) {
    using Op = DispatchOperation<Nodes, Rows>;
    run<Op>(
        params, nodes, rows,
        [](const Block<Op>& block, const typename Op::Source& source, const BlockOf& part) {
            notify(block, source, part);
        },
        [](const Block<Op>& block) {
            find_begins(block);
            receive_rows(block, [&](const UnitOfAll& unit, Late& late) { return receive_chunk(block, unit, late); });
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
