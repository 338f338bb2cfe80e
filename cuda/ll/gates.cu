// With which weight each entry of this rank's tokens takes part in the combine that follows, for the ranks that
// carry this one on other nodes. A warp per token.

#include "gates.cuh"

namespace nccl_ep::ll_gates_impl {

__device__ void run(const LlGatesParams& params) {
    const LlCombineParams& combine = params.combine.combine;
    const Operation<SeveralNodes> op(combine.common, {params.combine.nodes});
    const uint32_t top_k = combine.common.shape.top_k;
    for (uint32_t token = blockIdx.x * num_warps() + warp_idx();
         token < combine.common.shape.tokens; token += gridDim.x * num_warps()) {
        GateWords words;
        words.load(combine, token);
        const Gate gate = make_gate(op, words);
        if (lane_idx() < top_k) {
            params.gates[uint64_t{token} * top_k + lane_idx()] = gate.weight;
        }
    }
}

}  // namespace nccl_ep::ll_gates_impl

extern "C" __global__ void __launch_bounds__(nccl_ep::LL_GATES_THREADS)
    ll_gates(const __grid_constant__ nccl_ep::LlGatesParams params) {
    nccl_ep::ll_gates_impl::run(params);
}
