// The layer in high-throughput mode; see exchange.h.

#include <algorithm>

#include "programs/moe_layer/exchange.h"
#include "programs/moe_layer/received.h"

namespace moe {
namespace {

// The routing of rows that a rank sends or receives in a forward dispatch.
struct RowRouting {
    RowRouting(ncclEpGroup_t group, size_t num_rows, const ModelConfig& model)
        : weights(group, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, {num_rows, model.top_k}),
          topk_idx(group, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, {num_rows, model.top_k}) {}

    Tensor weights;
    Tensor topk_idx;
};

// The local experts of the received rows: ids packed to the left of each row, then -1. Rows behind
// the last received one have no expert.
struct ReceivedRouting {
    std::vector<int64_t> local_ids;  // [rows, top_k]
    std::vector<float> weights;      // [rows, top_k]
};

size_t CountReceivedRows(const ReceivedRouting& routing, size_t top_k) {
    size_t count = 0;
    while (count * top_k < routing.local_ids.size() && routing.local_ids[count * top_k] >= 0) ++count;
    return count;
}

// For every row the sum of weight * output over its experts on this rank, rounded once to bf16.
std::vector<uint16_t> RunExperts(const LayerContext& context, const ReceivedRouting& routing,
                                 const ReceivedRows& received) {
    const size_t hidden = context.model.hidden;
    const size_t num_rows = routing.local_ids.size() / context.model.top_k;
    std::vector<float> sums(num_rows * hidden, 0.0f);
    for (size_t e = 0; e < context.num_local_experts(); ++e) {
        const Expert expert = context.LocalExpert(e);
        for (size_t entry = 0; entry < routing.local_ids.size(); ++entry) {
            if (routing.local_ids[entry] != static_cast<int64_t>(e)) continue;
            const size_t row = entry / context.model.top_k;
            const size_t begin = row * hidden;
            const std::vector<float> y = expert.Forward(received.Row(row), Precision::kBf16);
            for (size_t i = 0; i < hidden; ++i) sums[begin + i] += routing.weights[entry] * y[i];
        }
    }
    std::vector<uint16_t> rounded(sums.size());
    std::transform(sums.begin(), sums.end(), rounded.begin(), ep_bf16_from_f32);
    return rounded;
}

}  // namespace

LayerOutput RunHighThroughputLayer(const LayerContext& context, const std::vector<uint16_t>& rows,
                                   const Routing& routing) {
    const ncclEpGroup_t group = context.group;
    const cudaStream_t stream = context.env.stream;
    const ModelConfig& model = context.model;
    const size_t num_tokens = rows.size() / model.hidden;

    // STEP 1: tokens, their experts and their weights, in device memory.
    Tensor tokens(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, {num_tokens, model.hidden});
    RowRouting sent(group, num_tokens, model);
    tokens.Upload(rows);
    sent.weights.Upload(routing.weights);
    sent.topk_idx.Upload(routing.expert_ids);

    // STEP 2: the handle. The ranks exchange the routing here, so each learns for how many rows it needs room.
    ncclEpHandle_t handle = nullptr;
    EP_REQUIRE_NCCL(ncclEpCreateHandle(&handle, group, sent.topk_idx.get(), nullptr, 0, nullptr, stream));
    unsigned num_rows = 0;
    EP_REQUIRE_NCCL(ncclEpHandleGetNumRecvTokens(handle, &num_rows));

    // STEP 3: dispatch tokens together with weights and expert ids.
    ReceivedRows received_rows(group, {num_rows}, model.hidden, context.fp8);
    RowRouting received(group, num_rows, model);
    const ncclNDTensor_t* const dispatch_inputs[] = {tokens.get(), sent.weights.get(), sent.topk_idx.get()};
    std::vector<ncclNDTensor_t*> dispatch_outputs = received_rows.outputs();
    dispatch_outputs.push_back(received.weights.get());
    dispatch_outputs.push_back(received.topk_idx.get());
    const ncclEpDispatchConfig_t dispatch_config = {};
    EP_REQUIRE_NCCL(ncclEpDispatch(handle, dispatch_inputs, 3, dispatch_outputs.data(),
                                   static_cast<unsigned>(dispatch_outputs.size()), nullptr, 0,
                                   /*send_only=*/0, &dispatch_config, stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(stream));

    // STEP 4: the experts of this rank, and their weighted sum for each row.
    const ReceivedRouting received_routing = {received.topk_idx.Download<int64_t>(),
                                              received.weights.Download<float>()};
    Tensor expert_sums(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, {num_rows, model.hidden});
    received_rows.Download();
    expert_sums.Upload(RunExperts(context, received_routing, received_rows));

    // STEP 5: combine. Each token gets the sum of its rows of all ranks, without further weights.
    Tensor combined(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, {num_tokens, model.hidden});
    const ncclNDTensor_t* const combine_inputs[] = {expert_sums.get()};
    ncclNDTensor_t* const combine_outputs[] = {combined.get()};
    EP_REQUIRE_NCCL(ncclEpCombine(handle, combine_inputs, 1, combine_outputs, 1, nullptr, 0,
                                  /*send_only=*/0, nullptr, stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(stream));

    // STEP 6: the handle goes first, then, at the end of this scope, the tensors.
    LayerOutput output = {combined.Download<uint16_t>(), CountReceivedRows(received_routing, model.top_k)};
    EP_REQUIRE_NCCL(ncclEpHandleDestroy(handle));
    return output;
}

}  // namespace moe
