// Rank-major low-latency dispatch of few tokens: the result of rank_dispatch.cu, with the grid of dispatch_few.cuh. An
// entry has the row's index among those of its source, so receivers need no counts.

#include "../base/entry.cuh"
#include "dispatch_few.cuh"
#include "rank_receive.cuh"

namespace nccl_ep::ll_rank_dispatch_few_impl {

using namespace ll_dispatch_impl;

// Blocks that receive counts also store "no expert" as the ids of unused rows.
template <typename Op>
__device__ __forceinline__ void receive_counts(const Block<Op>& block, const LlTopk& topk) {
    receive_counts_by_rank(block);
    clear_ids(block, topk, 1 + block.params.serve_blocks);
}

template <typename Rows>
__device__ __forceinline__ void run(const LlRankDispatchParams& params, const Rows& rows) {
    using Op = DispatchOperation<WholeOnOneNode, Rows, RankMajor>;
    const LlTopk& topk = params.topk;
    run_few<Op>(
        params.dispatch, rows,
        [&](const Block<Op>& block, const SourceShare& part, auto begin) {
            notify_by_rank(block, topk, block.source(0), part, begin);
        },
        [&](const Block<Op>& block) { receive_counts(block, topk); },
        [&](const Block<Op>& block, const WorkUnit& unit, LateWait& late) {
            return receive_chunk(block, topk, unit, late, [&](auto&&... what) {
                return receive_with_tokens(block, unit, what...);
            });
        });
}

ENTRY(ll_rank_dispatch_few) { run(params, PlainRows{}); }
ENTRY(ll_rank_dispatch_few_scaled) { run(params.dispatch, ForwardedRows<1>{{params.rows}}); }
ENTRY_BY_TYPE(ll_rank_dispatch_few_cast, run(params.dispatch, CastRows<T, 1>{{params.rows}}))

}  // namespace nccl_ep::ll_rank_dispatch_few_impl
