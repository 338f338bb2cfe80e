// Packs the first message of a combine to this rank's rail peers: the weight with which each entry of this rank's
// tokens takes part. One warp per token.

#include "../base/entry.cuh"
#include "topk_weights.cuh"

namespace nccl_ep::ll_topk_weights_impl {

template <typename Net>
__device__ void run(const LlTopkWeightsParams& params) {
    const LlCombineParams& combine = params.combine.combine;
    const LlCommon& common = combine.common;
    Operation<SeveralNodes<Net>> op(common, {params.combine.nodes, true});
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        op.resume(next_epoch(*common.channel_state));
        Net::send(params.message, header_of_operation(op, common.shape.tokens));
    }
    float* weights = reinterpret_cast<float*>(body_of(params.message));
    const uint32_t top_k = common.shape.top_k;
    for (uint32_t token = blockIdx.x * num_warps() + warp_idx(); token < common.shape.tokens;
         token += gridDim.x * num_warps()) {
        TopkLoads words;
        words.load(combine, token);
        const TopkWeight topk = make_topk_weight(op, words);
        if (lane_idx() < top_k) {
            weights[token * top_k + lane_idx()] = topk.weight;
        }
    }
}

ENTRY(ll_topk_weights) { run<TwoSided>(params); }

}  // namespace nccl_ep::ll_topk_weights_impl
