// Rank-major low-latency combine over several nodes: like rank_combine.cu within nodes, like combine.cu between them.

#include "../base/entry.cuh"
#include "../layout/rank_major.cuh"
#include "combine_run.cuh"

namespace nccl_ep::ll_rank_combine_nodes_impl {

using namespace ll_combine_impl;

// One warp sends a unit. The row is checked, as the handle's memory is undefined if no dispatch has run.
template <typename Op>
__device__ void send_unit(const Block<Op>& block, const WorkUnit& outgoing) {
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
    send_chunks(op, to, chunks, [&](uint32_t i) { return data[i].vec; });
}

template <typename Type>
__device__ __forceinline__ void run(const LlCombineNodesParams& params) {
    using Op = CombineOperation<SeveralNodes<TwoSided>, FewTokens, false, RankMajor>;
    ll_combine_impl::run<Type, Op>(
        params.combine, SeveralNodes<TwoSided>{params.nodes, true}, [](const Block<Op>&) {},
        [](const Block<Op>& block, const WorkUnit& outgoing) { send_unit(block, outgoing); });
}

ENTRY_BY_TYPE(ll_rank_combine_nodes, run<T>(params))

}  // namespace nccl_ep::ll_rank_combine_nodes_impl
