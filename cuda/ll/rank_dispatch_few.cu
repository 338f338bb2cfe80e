// Rank-major low-latency dispatch of few tokens (dispatch_few.cuh): what it does is in rank_dispatch.cu. An entry tells
// the row's place among those of its source, so receivers need no counts.

#include "../base/entry.cuh"
#include "dispatch_few.cuh"
#include "rank_receive.cuh"

namespace nccl_ep::ll_rank_dispatch_few_impl {

using namespace ll_dispatch_impl;

// One warp receives and keeps a chunk, if its source has such a token. False if it is given up.
template <typename Op>
__device__ __forceinline__ bool receive_chunk(const Block<Op>& block, const LlBeside& beside, const UnitOfAll& unit,
                                              Late& late) {
    const BankRow<Own> from = block.op.here().row(block.bank_slots.of_token(unit.rank, unit.token));
    const auto chunk = block.rows.chunk(block.shape, unit.number);
    Received<Op> received;
    bool is_beyond = false;
    return receive_with_tokens(block, unit, from, chunk, received, is_beyond, late) &&
           (is_beyond || keep_chunk(block, beside, unit, from, chunk, received, late));
}

// The block that hears also marks the rows that hold nothing.
template <typename Op>
__device__ __forceinline__ void hear(const Block<Op>& block, const LlBeside& beside) {
    time_sources(block);
    hear_sources_by_rank(block, true);
    __syncthreads();
    clear_ids(block, beside, 1);
}

template <typename Rows>
__device__ __forceinline__ void run(const LlRankDispatchParams& params, const Rows& rows) {
    using Op = DispatchOperation<WholeOnOneNode, Rows, RankMajor>;
    const LlBeside& beside = params.beside;
    run_few<Op>(
        params.dispatch, rows,
        [&](const Block<Op>& block, const BlockOf& part) { notify_by_rank(block, beside, block.source(0), part); },
        [&](const Block<Op>& block) { hear(block, beside); },
        [&](const Block<Op>& block, const UnitOfAll& unit, Late& late) {
            return receive_chunk(block, beside, unit, late);
        });
}

ENTRY(ll_rank_dispatch_few) { run(params, PlainRows{}); }
ENTRY(ll_rank_dispatch_few_scaled) { run(params.dispatch, ForwardedRows<1>{{params.rows}}); }
ENTRY(ll_rank_dispatch_few_cast_bf16) { run(params.dispatch, CastRows<Bf16, 1>{{params.rows}}); }
ENTRY(ll_rank_dispatch_few_cast_f16) { run(params.dispatch, CastRows<F16, 1>{{params.rows}}); }
ENTRY(ll_rank_dispatch_few_cast_f32) { run(params.dispatch, CastRows<F32, 1>{{params.rows}}); }

}  // namespace nccl_ep::ll_rank_dispatch_few_impl
