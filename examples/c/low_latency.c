// Low latency (LL): the MoE layer of a decode step, twice, with one handle.
//
//   out[t] = sum over the experts e of token t of weight(t, e) * scale(e) * x[t]
//
// Multiplying by scale(e) stands for an expert's network. It is done on the host, with numbers so
// small that bfloat16 holds every result exactly.
#include "example.h"

enum { kHidden = 64, kTopK = 2, kMaxTokens = 32, kExpertsPerRank = 2, kSteps = 2 };

typedef struct {
    const Ranks* ranks;
    unsigned num_tokens;  // of this rank: each rank has its own number, 0 is fine
    unsigned num_slots;   // for each local expert: enough for every token of every rank
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    ncclNDTensor_t tokens, topk_idx, weights;  // [num_tokens, ..]: what this rank sends
    ncclNDTensor_t received, results;          // [kExpertsPerRank, num_slots, kHidden]
    ncclNDTensor_t counter;                    // [kExpertsPerRank]: slots in use
    ncclNDTensor_t combined;                   // [num_tokens, kHidden]: what comes home
} Layer;

static float token_value(int rank, unsigned t, unsigned i) {
    return (float)(((unsigned)rank + 2 * t + i) % 16);
}
static float scale_of(int64_t expert) { return (float)(1 + expert % 4); }
static float weight_of(unsigned t, unsigned k) { return (t + k) % 2 == 0 ? 0.25f : 0.75f; }

// Two different experts for each token, others in each step.
static int64_t expert_of(const Ranks* ranks, unsigned step, unsigned t, unsigned k) {
    const unsigned num_experts = (unsigned)ranks->size * kExpertsPerRank;
    const unsigned first = (5 * (unsigned)ranks->rank + 3 * t + step) % num_experts;
    return (first + k * (1 + t % (num_experts - 1))) % num_experts;
}

// 1. A group serves all layers of a model and holds the buffers that they share.
static void create_group(Layer* layer) {
    const ncclEpGroupConfig_t config = {
        .version = 1,
        .algorithm = NCCL_EP_ALGO_LOW_LATENCY,
        .num_experts = (unsigned)layer->ranks->size * kExpertsPerRank,
        .max_tokens_per_rank = kMaxTokens,
        .token_size_bytes = kHidden * sizeof(uint16_t),
        .rdma_buffer_size = NCCL_EP_AUTO,
        .num_qp_per_rank = NCCL_EP_AUTO,
        .num_channels = NCCL_EP_AUTO,
    };
    TRY_EP(ncclEpCreateGroup(&layer->group, layer->ranks->comm, &config, layer->ranks->stream, NULL,
                             NULL));
}

// 2. Tensors. Any device memory will do; ncclEpTensorCreate also fills in the descriptor.
static void create_tensors(Layer* layer) {
    const ncclEpGroup_t group = layer->group;
    const unsigned tokens = layer->num_tokens, slots = layer->num_slots;
    const ncclEpTensorTag_t rows = NCCL_EP_TENSOR_TAG_TOKENS;
    layer->tokens = make_tensor(group, rows, ncclBfloat16, 2, tokens, kHidden, 1);
    layer->combined = make_tensor(group, rows, ncclBfloat16, 2, tokens, kHidden, 1);
    layer->received = make_tensor(group, rows, ncclBfloat16, 3, kExpertsPerRank, slots, kHidden);
    layer->results = make_tensor(group, rows, ncclBfloat16, 3, kExpertsPerRank, slots, kHidden);
    layer->topk_idx =
        make_tensor(group, NCCL_EP_TENSOR_TAG_TOPK_IDX, ncclInt64, 2, tokens, kTopK, 1);
    layer->weights =
        make_tensor(group, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, ncclFloat32, 2, tokens, kTopK, 1);
    layer->counter = make_tensor(group, NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, ncclInt32, 1,
                                 kExpertsPerRank, 1, 1);
}

// 3. A step's tokens, experts and weights, written where the last step's were. The handle, made
// once, reads the ids anew in each operation.
static void route(Layer* layer, unsigned step) {
    static uint16_t tokens[kMaxTokens * kHidden];
    static int64_t topk_idx[kMaxTokens * kTopK];
    static float weights[kMaxTokens * kTopK];
    const unsigned num = layer->num_tokens;
    for (unsigned n = 0; n < num * kHidden; ++n) {
        tokens[n] = to_bf16(token_value(layer->ranks->rank, n / kHidden, n % kHidden));
    }
    for (unsigned n = 0; n < num * kTopK; ++n) {
        topk_idx[n] = expert_of(layer->ranks, step, n / kTopK, n % kTopK);
        weights[n] = weight_of(n / kTopK, n % kTopK);
    }
    upload(&layer->tokens, tokens, sizeof(tokens[0]) * num * kHidden);
    upload(&layer->topk_idx, topk_idx, sizeof(topk_idx[0]) * num * kTopK);
    upload(&layer->weights, weights, sizeof(weights[0]) * num * kTopK);
}

static void dispatch(Layer* layer) {
    const ncclNDTensor_t* inputs[] = {&layer->tokens};
    ncclNDTensor_t* outputs[] = {&layer->received};
    ncclNDTensor_t* locals[] = {&layer->counter};
    TRY_EP(ncclEpDispatch(layer->handle, inputs, 1, outputs, 1, locals, 1, 0, NULL,
                          layer->ranks->stream));
}

// 4. The experts of this rank. The rows of expert e are its slots 0 to counter[e] - 1.
static void apply_experts(Layer* layer) {
    int32_t counts[kExpertsPerRank];
    const size_t expert_elements = (size_t)layer->num_slots * kHidden;
    const size_t bytes = kExpertsPerRank * expert_elements * sizeof(uint16_t);
    uint16_t* rows = malloc(bytes);
    REQUIRE(rows != NULL);
    TRY_CUDA(cudaStreamSynchronize(layer->ranks->stream));
    download(counts, &layer->counter, sizeof(counts));
    download(rows, &layer->received, bytes);
    for (unsigned e = 0; e < kExpertsPerRank; ++e) {
        const float scale = scale_of((int64_t)layer->ranks->rank * kExpertsPerRank + e);
        uint16_t* of_expert = &rows[e * expert_elements];
        for (size_t n = 0; n < (size_t)counts[e] * kHidden; ++n) {
            of_expert[n] = to_bf16(scale * from_bf16(of_expert[n]));
        }
    }
    upload(&layer->results, rows, bytes);
    free(rows);
}

// 5. Each token's results come home, times its weights, which never leave its rank, and summed.
static void combine(Layer* layer) {
    const ncclNDTensor_t* inputs[] = {&layer->results};
    ncclNDTensor_t* outputs[] = {&layer->combined};
    ncclNDTensor_t* locals[] = {&layer->weights};
    TRY_EP(ncclEpCombine(layer->handle, inputs, 1, outputs, 1, locals, 1, 0, NULL,
                         layer->ranks->stream));
}

static int is_right(const Layer* layer, unsigned step) {
    static uint16_t combined[kMaxTokens * kHidden];
    TRY_CUDA(cudaStreamSynchronize(layer->ranks->stream));
    download(combined, &layer->combined, sizeof(uint16_t) * layer->num_tokens * kHidden);
    for (unsigned n = 0; n < layer->num_tokens * kHidden; ++n) {
        const unsigned t = n / kHidden;
        float factor = 0;
        for (unsigned k = 0; k < kTopK; ++k) {
            factor += weight_of(t, k) * scale_of(expert_of(layer->ranks, step, t, k));
        }
        const float expected = factor * token_value(layer->ranks->rank, t, n % kHidden);
        if (from_bf16(combined[n]) != expected) return 0;
    }
    return 1;
}

int main(int argc, char** argv) {
    Ranks ranks = example_start(&argc, &argv);
    Layer layer = {.ranks = &ranks,
                   .num_tokens = kMaxTokens - (unsigned)ranks.rank % kMaxTokens,
                   .num_slots = (unsigned)ranks.size * kMaxTokens};
    create_group(&layer);
    create_tensors(&layer);
    TRY_EP(ncclEpCreateHandle(&layer.handle, layer.group, &layer.topk_idx, NULL, 0, NULL,
                              ranks.stream, false));
    int right = 1;
    for (unsigned step = 0; step < kSteps; ++step) {
        route(&layer, step);
        dispatch(&layer);
        apply_experts(&layer);
        combine(&layer);
        right = is_right(&layer, step) && right;
    }
    // 6. Handles first, the group last, then the communicator.
    ncclNDTensor_t* tensors[] = {&layer.tokens,   &layer.topk_idx, &layer.weights, &layer.received,
                                 &layer.results, &layer.counter,  &layer.combined};
    TRY_EP(ncclEpHandleDestroy(layer.handle));
    destroy_tensors(layer.group, tensors, sizeof(tensors) / sizeof(tensors[0]));
    TRY_EP(ncclEpGroupDestroy(layer.group, ranks.stream));
    return example_finish(&ranks, right);
}
