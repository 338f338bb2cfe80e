// Rank-major low-latency combine: each rank returns one row of a token, which the caller has made of its experts', and
// the token's home adds them.
//
// Rows travel as the sums of ll_combine do, through the same slots of the bank; nothing is told beside them but the
// fingerprint. Which row is whose, and who has rows of a token, is what the dispatch left in the handle's memory.
//
// Order of summation. a = 0; a = a + y for the ranks of a token in the order of the first k that names each, in fp32;
// out = round(a). Over several nodes as in combine.cu.

#include "../base/entry.cuh"
#include "../layout/rank_major.cuh"
#include "combine_run.cuh"

namespace nccl_ep::ll_rank_combine_impl {

using namespace ll_combine_impl;

// One warp sends some chunks. The handle's memory holds anything if its dispatch has not run; no such row is taken at
// its word.
template <typename Op>
__device__ void send_unit(const Block<Op>& block, const UnitOfAll& outgoing) {
    const Op& op = block.op;
    const uint32_t home = outgoing.rank;
    const uint32_t row = static_cast<uint32_t>(op.rows_of(home, outgoing.token)[0]);
    if (row >= block.output.rows()) {
        return;
    }
    const Chunks<Op::kChunks> chunks(block.shape, outgoing.number);
    const uint32_t slot = block.bank_slots.of_sum(op.nodes.number_of(home), outgoing.token, op.common.peers.rank);
    const BankRow<Remote> to = op.at(op.nodes.forwarder_of(home)).row(slot);
    const uint8_t* from = block.params.rows + row_format(block.shape).offset(row);
    ChunkData data[Op::kChunks];
#pragma unroll
    for (uint32_t i = 0; i < Op::kChunks; ++i) {
        load_const(data[i], from, chunks.chunk(i));
    }
#pragma unroll
    for (uint32_t i = 0; i < Op::kChunks; ++i) {
        send(op, to, chunks.chunk(i), data[i]);
    }
}

template <typename Type, typename Nodes>
__device__ __forceinline__ void run(const LlCombineParams& params, const Nodes& nodes) {
    using Op = CombineOperation<Nodes, FewTokens, false, RankMajor>;
    ll_combine_impl::run<Type, Op>(
        params, nodes, [](const Block<Op>&) {},
        [](const Block<Op>& block, const UnitOfAll& outgoing) { send_unit(block, outgoing); });
}

template <typename Type>
__device__ __forceinline__ void run(const LlCombineParams& params) {
    run<Type>(params, OneNode{params.common.peers});
}

template <typename Type>
__device__ __forceinline__ void run(const LlCombineNodesParams& params) {
    run<Type>(params.combine, SeveralNodes<TwoSided>{params.nodes, true});
}

ENTRY(ll_rank_combine_bf16) { run<Bf16>(params); }
ENTRY(ll_rank_combine_f16) { run<F16>(params); }
ENTRY(ll_rank_combine_f32) { run<F32>(params); }
ENTRY(ll_rank_combine_nodes_bf16) { run<Bf16>(params); }
ENTRY(ll_rank_combine_nodes_f16) { run<F16>(params); }
ENTRY(ll_rank_combine_nodes_f32) { run<F32>(params); }

}  // namespace nccl_ep::ll_rank_combine_impl
