// The layer in low-latency mode; see exchange.h.

#include <algorithm>
#include <numeric>

#include "programs/moe_layer/exchange.h"
#include "programs/moe_layer/received.h"

namespace moe {
namespace {

// The experts' outputs, each where its row was received. Expert e owns slab e of R * M slots; its rows fill
// the slots 0 .. counts[e] - 1, the rest is unused.
std::vector<uint16_t> RunExperts(const LayerContext& context, const std::vector<int32_t>& counts,
                                 const ReceivedRows& received) {
    const size_t hidden = context.model.hidden;
    const size_t num_slots = context.num_ranks() * context.max_tokens_per_rank;
    std::vector<uint16_t> slabs(counts.size() * num_slots * hidden);
    for (size_t e = 0; e < counts.size(); ++e) {
        EP_REQUIRE(counts[e] >= 0 && static_cast<size_t>(counts[e]) <= num_slots);
        const Expert expert = context.LocalExpert(e);
        for (size_t slot = 0; slot < static_cast<size_t>(counts[e]); ++slot) {
            const size_t row = e * num_slots + slot;
            const std::vector<float> y = expert.Forward(received.Row(row), Precision::kBf16);
            std::transform(y.begin(), y.end(), &slabs[row * hidden], ep_bf16_from_f32);
        }
    }
    return slabs;
}

}  // namespace

LayerOutput RunLowLatencyLayer(const LayerContext& context, const std::vector<uint16_t>& rows, const Routing& routing) {
    const ncclEpGroup_t group = context.group;
    const cudaStream_t stream = context.env.stream;
    const size_t hidden = context.model.hidden;
    const size_t top_k = context.model.top_k;
    const size_t num_tokens = rows.size() / hidden;
    const size_t num_local = context.num_local_experts();
    const size_t num_slots = context.num_ranks() * context.max_tokens_per_rank;

    // STEP 1: tokens, their experts and their weights, in device memory.
    Tensor tokens(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, {num_tokens, hidden});
    Tensor topk_idx(group, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, {num_tokens, top_k});
    Tensor weights(group, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, {num_tokens, top_k});
    tokens.Upload(rows);
    topk_idx.Upload(routing.expert_ids);
    weights.Upload(routing.weights);

    // STEP 2: the handle ties dispatch and combine together. topk_idx has to outlive it.
    ncclEpHandle_t handle = nullptr;
    EP_REQUIRE_NCCL(ncclEpCreateHandle(&handle, group, topk_idx.get(), nullptr, 0, nullptr, stream));

    // STEP 3: dispatch. The counter says how many rows each local expert has received.
    ReceivedRows received(group, {num_local, num_slots}, hidden, context.fp8);
    Tensor counter(group, ncclInt32, NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, {num_local});
    const ncclNDTensor_t* const dispatch_inputs[] = {tokens.get()};
    const std::vector<ncclNDTensor_t*> dispatch_outputs = received.outputs();
    ncclNDTensor_t* const dispatch_locals[] = {counter.get()};
    const ncclEpDispatchConfig_t dispatch_config = {};
    EP_REQUIRE_NCCL(ncclEpDispatch(handle, dispatch_inputs, 1, dispatch_outputs.data(),
                                   static_cast<unsigned>(dispatch_outputs.size()), dispatch_locals,
                                   1, /*send_only=*/0, &dispatch_config, stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(stream));

    // STEP 4: the experts of this rank.
    const std::vector<int32_t> counts = counter.Download<int32_t>();
    received.Download();
    Tensor expert_outputs(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, {num_local, num_slots, hidden});
    expert_outputs.Upload(RunExperts(context, counts, received));

    // STEP 5: combine. Each token gets the sum of weight * expert output, in its own place.
    Tensor combined(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, {num_tokens, hidden});
    const ncclNDTensor_t* const combine_inputs[] = {expert_outputs.get()};
    ncclNDTensor_t* const combine_outputs[] = {combined.get()};
    ncclNDTensor_t* const combine_locals[] = {weights.get()};
    EP_REQUIRE_NCCL(ncclEpCombine(handle, combine_inputs, 1, combine_outputs, 1, combine_locals, 1,
                                  /*send_only=*/0, nullptr, stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(stream));

    // STEP 6: the handle goes first, then, at the end of this scope, the tensors.
    LayerOutput output = {combined.Download<uint16_t>(), std::accumulate(counts.begin(), counts.end(), size_t{0})};
    EP_REQUIRE_NCCL(ncclEpHandleDestroy(handle));
    return output;
}

}  // namespace moe
