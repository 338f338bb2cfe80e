// The layer in both modes, step by step; see layer.h.
#include "programs/moe_layer/layer.h"

#include <cmath>
#include <numeric>
#include <optional>

namespace moe {
namespace {

// A tensor of the library with its memory; a C++ scope is its lifetime.
class Tensor {
   public:
    Tensor(ncclEpGroup_t group, ncclDataType_t datatype, ncclEpTensorTag_t tag, const std::vector<size_t>& sizes)
        : group_(group), tensor_() {
        unsigned size[3] = {1, 1, 1};
        EP_REQUIRE(!sizes.empty() && sizes.size() <= 3);
        for (size_t i = 0; i < sizes.size(); ++i) size[i] = static_cast<unsigned>(sizes[i]);
        EP_REQUIRE_NCCL(ncclEpTensorCreate(group, &tensor_, static_cast<unsigned>(sizes.size()),
                                           datatype, tag, size[0], size[1], size[2]));
    }
    // With these values.
    template <typename T>
    Tensor(ncclEpGroup_t group, ncclDataType_t datatype, ncclEpTensorTag_t tag, const std::vector<size_t>& sizes,
           const std::vector<T>& values)
        : Tensor(group, datatype, tag, sizes) {
        EP_REQUIRE(values.size() * sizeof(T) == ep_tensor_bytes(&tensor_));
        ep_tensor_upload(&tensor_, values.data());
    }
    ~Tensor() { EP_REQUIRE_NCCL(ncclEpTensorDestroy(group_, &tensor_)); }
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;

    ncclNDTensor_t* get() { return &tensor_; }

    template <typename T>
    std::vector<T> Download() const {
        std::vector<T> values(ep_tensor_bytes(&tensor_) / sizeof(T));
        ep_tensor_download(&tensor_, values.data());
        return values;
    }

   private:
    ncclEpGroup_t group_;
    ncclNDTensor_t tensor_;
};

// A sign, 4 bits of exponent with bias 7, 3 bits of mantissa.
float FromE4m3(uint8_t bits) {
    const int exponent = bits >> 3 & 0xf;
    const int mantissa = bits & 7;
    if ((bits & 0x7f) == 0x7f) return NAN;
    const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                          : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

// The rows that a dispatch delivers, as bfloat16 or as e4m3 with a float32 scale for every 128 elements: the presence
// of the scales alone asks the library to cast.
class ReceivedRows {
   public:
    // `rows` are the tensor's dimensions in front of `hidden`.
    ReceivedRows(const LayerContext& context, const std::vector<size_t>& rows)
        : hidden_(context.model.hidden),
          tokens_(context.group, context.fp8 ? kE4m3 : ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, With(rows, hidden_)) {
        if (!context.fp8) return;
        scales_.emplace(context.group, ncclFloat32, NCCL_EP_TENSOR_TAG_SCALES, With(rows, NumScales()));
    }

    // The tensors for a dispatch.
    std::vector<ncclNDTensor_t*> outputs() {
        if (!scales_) return {tokens_.get()};
        return {tokens_.get(), scales_->get()};
    }

    // After the dispatch, before the first row is read.
    void Download() {
        if (!scales_) {
            bf16_rows_ = tokens_.Download<uint16_t>();
            return;
        }
        e4m3_rows_ = tokens_.Download<uint8_t>();
        row_scales_ = scales_->Download<float>();
    }

    std::vector<float> Row(size_t index) const {
        if (!scales_) return ToFloat(&bf16_rows_[index * hidden_], hidden_);
        std::vector<float> row(hidden_);
        for (size_t i = 0; i < hidden_; ++i) {
            row[i] = FromE4m3(e4m3_rows_[index * hidden_ + i]) * row_scales_[index * NumScales() + i / kBlock];
        }
        return row;
    }

   private:
    static constexpr auto kE4m3 = static_cast<ncclDataType_t>(10);
    static constexpr size_t kBlock = 128;

    size_t NumScales() const { return (hidden_ + kBlock - 1) / kBlock; }
    static std::vector<size_t> With(std::vector<size_t> rows, size_t columns) {
        rows.push_back(columns);
        return rows;
    }

    size_t hidden_;
    Tensor tokens_;
    std::optional<Tensor> scales_;
    std::vector<uint16_t> bf16_rows_;
    std::vector<uint8_t> e4m3_rows_;
    std::vector<float> row_scales_;
};

// The tensors of a call.
struct Lists {
    std::vector<const ncclNDTensor_t*> inputs;
    std::vector<ncclNDTensor_t*> outputs, locals;
};

unsigned Count(size_t size) { return static_cast<unsigned>(size); }

// Each waits for its operation, as the host reads the results.
void Dispatch(const LayerContext& context, ncclEpHandle_t handle, const Lists& lists) {
    const auto& [in, out, local] = lists;
    const ncclEpDispatchConfig_t config = {};
    EP_REQUIRE_NCCL(ncclEpDispatch(handle, in.data(), Count(in.size()), out.data(), Count(out.size()), local.data(),
                                   Count(local.size()), /*send_only=*/0, &config, context.env.stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(context.env.stream));
}

void Combine(const LayerContext& context, ncclEpHandle_t handle, const Lists& lists) {
    const auto& [in, out, local] = lists;
    EP_REQUIRE_NCCL(ncclEpCombine(handle, in.data(), Count(in.size()), out.data(), Count(out.size()), local.data(),
                                  Count(local.size()), /*send_only=*/0, nullptr, context.env.stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(context.env.stream));
}

// What a rank sends: its tokens, their experts and their weights, in device memory; and the handle for them, which ties
// dispatch and combine together. topk_idx has to outlive it.
struct Sent {
    Sent(const LayerContext& context, const std::vector<uint16_t>& rows, const Routing& routing)
        : num_tokens(rows.size() / context.model.hidden),
          tokens(context.group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, {num_tokens, context.model.hidden}, rows),
          topk_idx(context.group, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, {num_tokens, context.model.top_k},
                   routing.expert_ids),
          weights(context.group, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, {num_tokens, context.model.top_k},
                  routing.weights) {
        EP_REQUIRE_NCCL(ncclEpCreateHandle(&handle, context.group, topk_idx.get(), nullptr, 0, nullptr,
                                           context.env.stream));
    }
    // The handle goes first, then the tensors.
    ~Sent() { EP_REQUIRE_NCCL(ncclEpHandleDestroy(handle)); }

    size_t num_tokens;
    Tensor tokens, topk_idx, weights;
    ncclEpHandle_t handle = nullptr;
};

// ---- Low latency -------------------------------------------------------------------------------

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

// ---- High throughput ---------------------------------------------------------------------------

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
    const size_t top_k = context.model.top_k;
    std::vector<float> sums(routing.local_ids.size() / top_k * hidden, 0.0f);
    for (size_t e = 0; e < context.num_local_experts(); ++e) {
        const Expert expert = context.LocalExpert(e);
        for (size_t entry = 0; entry < routing.local_ids.size(); ++entry) {
            if (routing.local_ids[entry] != static_cast<int64_t>(e)) continue;
            const size_t row = entry / top_k;
            const std::vector<float> y = expert.Forward(received.Row(row), Precision::kBf16);
            for (size_t i = 0; i < hidden; ++i) sums[row * hidden + i] += routing.weights[entry] * y[i];
        }
    }
    std::vector<uint16_t> rounded(sums.size());
    std::transform(sums.begin(), sums.end(), rounded.begin(), ep_bf16_from_f32);
    return rounded;
}

}  // namespace

LayerOutput RunLowLatencyLayer(const LayerContext& context, const std::vector<uint16_t>& rows, const Routing& routing) {
    const ncclEpGroup_t group = context.group;
    const size_t hidden = context.model.hidden;
    const size_t num_local = context.num_local_experts();
    const size_t num_slots = context.num_ranks() * context.max_tokens_per_rank;

    // STEP 1: tokens, their experts and their weights, in device memory, and a handle.
    Sent sent(context, rows, routing);

    // STEP 2: dispatch. The counter says how many rows each local expert has received.
    ReceivedRows received(context, {num_local, num_slots});
    Tensor counter(group, ncclInt32, NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, {num_local});
    Dispatch(context, sent.handle, {{sent.tokens.get()}, received.outputs(), {counter.get()}});

    // STEP 3: the experts of this rank.
    const std::vector<int32_t> counts = counter.Download<int32_t>();
    received.Download();
    Tensor expert_outputs(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, {num_local, num_slots, hidden},
                          RunExperts(context, counts, received));

    // STEP 4: combine. Each token gets the sum of weight * expert output, in its own place.
    Tensor combined(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, {sent.num_tokens, hidden});
    Combine(context, sent.handle, {{expert_outputs.get()}, {combined.get()}, {sent.weights.get()}});
    return {combined.Download<uint16_t>(), std::accumulate(counts.begin(), counts.end(), size_t{0})};
}

LayerOutput RunHighThroughputLayer(const LayerContext& context, const std::vector<uint16_t>& rows,
                                   const Routing& routing) {
    const ncclEpGroup_t group = context.group;
    const size_t hidden = context.model.hidden;
    const size_t top_k = context.model.top_k;

    // STEP 1: as in low latency; but the ranks exchange the routing here, so each learns for how many rows it needs
    // room.
    Sent sent(context, rows, routing);
    unsigned num_rows = 0;
    EP_REQUIRE_NCCL(ncclEpHandleGetNumRecvTokens(sent.handle, &num_rows));

    // STEP 2: dispatch tokens together with weights and expert ids.
    ReceivedRows received(context, {num_rows});
    Tensor weights(group, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, {num_rows, top_k});
    Tensor topk_idx(group, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, {num_rows, top_k});
    std::vector<ncclNDTensor_t*> outputs = received.outputs();
    outputs.insert(outputs.end(), {weights.get(), topk_idx.get()});
    Dispatch(context, sent.handle, {{sent.tokens.get(), sent.weights.get(), sent.topk_idx.get()}, outputs, {}});

    // STEP 3: the experts of this rank, and their weighted sum for each row.
    const ReceivedRouting received_routing = {topk_idx.Download<int64_t>(), weights.Download<float>()};
    received.Download();
    Tensor expert_sums(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, {num_rows, hidden},
                       RunExperts(context, received_routing, received));

    // STEP 4: combine. Each token gets the sum of its rows of all ranks, without further weights.
    Tensor combined(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, {sent.num_tokens, hidden});
    Combine(context, sent.handle, {{expert_sums.get()}, {combined.get()}, {}});
    return {combined.Download<uint16_t>(), CountReceivedRows(received_routing, top_k)};
}

}  // namespace moe
