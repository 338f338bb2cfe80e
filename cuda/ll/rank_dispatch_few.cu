// Rank-major low-latency dispatch of few tokens (dispatch_few.cuh): what it does is in rank_dispatch.cu. An entry tells
// the row's place among those of its source, so receivers need no counts.

#include "../base/entry.cuh"
#include "dispatch_few.cuh"
#include "rank_receive.cuh"

namespace nccl_ep::ll_rank_dispatch_few_impl {

using namespace ll_dispatch_impl;

// Blocks that hear also mark the rows that hold nothing.
template <typename Op>
__device__ __forceinline__ void hear(const Block<Op>& block, const LlBeside& beside) {
    hear_sources_by_rank(block);
    clear_ids(block, beside, 1 + block.params.serve_blocks);
}

template <typename Rows>
__device__ __forceinline__ void run(const LlRankDispatchParams& params, const Rows& rows) {
    using Op = DispatchOperation<WholeOnOneNode, Rows, RankMajor>;
    const LlBeside& beside = params.beside;
    run_few<Op>(
        params.dispatch, rows,
        [&](const Block<Op>& block, const BlockOf& part, auto begin) {
            notify_by_rank(block, beside, block.source(0), part, begin);
        },
        [&](const Block<Op>& block) { hear(block, beside); },
        [&](const Block<Op>& block, const UnitOfAll& unit, Late& late) {
            return receive_chunk(block, beside, unit, late, [&](auto&&... what) {
                return receive_with_tokens(block, unit, what...);
            });
        });
}

ENTRY(ll_rank_dispatch_few) { run(params, PlainRows{}); }
ENTRY(ll_rank_dispatch_few_scaled) { run(params.dispatch, ForwardedRows<1>{{params.rows}}); }
ENTRY_BY_TYPE(ll_rank_dispatch_few_cast, run(params.dispatch, CastRows<T, 1>{{params.rows}}))

}  // namespace nccl_ep::ll_rank_dispatch_few_impl
