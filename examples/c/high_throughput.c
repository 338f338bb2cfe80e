// High throughput (HT): one MoE layer of training, forward and backward.
//
//   out[t] = sum over the experts e of token t of weight(t, e) * scale(e) * x[t]
//
// Multiplying by scale(e) stands for an expert's network. It is done on the host, with numbers so
// small that bfloat16 holds every result exactly, the gradients, too.
#include "example.h"

enum { kHidden = 64, kTopK = 2, kMaxTokens = 32, kExpertsPerRank = 2 };

typedef struct {
    const Ranks* ranks;
    unsigned num_tokens;  // of this rank: each rank has its own number, 0 is fine
    unsigned num_rows;    // room for the rows that this rank may receive
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    ncclNDTensor_t tokens, topk_idx, weights;   // [num_tokens, ..]: what this rank sends
    ncclNDTensor_t rows, row_idx, row_weights;  // [num_rows, ..]: what it receives
    ncclNDTensor_t results, result_weights;     // [num_rows, ..]: what it sends back
    ncclNDTensor_t combined, combined_weights;  // [num_tokens, ..]: what comes home
    uint16_t *host_rows, *host_gradients, *host_results;
    int64_t* host_idx;
    float* host_weights;
} Layer;

// ---- The numbers of the example

typedef float (*Value)(int rank, unsigned t, unsigned i);

static float token_value(int rank, unsigned t, unsigned i) {
    return (float)(((unsigned)rank + 2 * t + i) % 16);
}
static float gradient_value(int rank, unsigned t, unsigned i) {
    return (float)((3 * (unsigned)rank + t + 5 * i) % 8);
}
static float scale_of(int64_t expert) { return (float)(1 + expert % 4); }
static float weight_of(unsigned t, unsigned k) { return (t + k) % 2 == 0 ? 0.25f : 0.75f; }

// Two different experts for each token, in either order.
static int64_t expert_of(const Ranks* ranks, unsigned t, unsigned k) {
    const unsigned num_experts = (unsigned)ranks->size * kExpertsPerRank;
    const unsigned first = (5 * (unsigned)ranks->rank + 3 * t) % num_experts;
    return (first + k * (1 + t % (num_experts - 1))) % num_experts;
}

static void upload_tokens(const Layer* layer, Value value) {
    static uint16_t host[kMaxTokens * kHidden];
    const unsigned elements = layer->num_tokens * kHidden;
    for (unsigned n = 0; n < elements; ++n) {
        host[n] = to_bf16(value(layer->ranks->rank, n / kHidden, n % kHidden));
    }
    upload(&layer->tokens, host, sizeof(host[0]) * elements);
}

// ---- Preparation

// 1. A group serves all layers of a model and holds the buffers that they share.
static void create_group(Layer* layer) {
    const ncclEpGroupConfig_t config = {
        .version = 1,
        .algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT,
        .num_experts = (unsigned)layer->ranks->size * kExpertsPerRank,
        .max_tokens_per_rank = NCCL_EP_AUTO,  // each handle finds out how many rows it receives
        .token_size_bytes = kHidden * sizeof(uint16_t),
        .num_channels = NCCL_EP_AUTO,  // SMs that kernels take, in pairs
    };
    TRY_EP(ncclEpCreateGroup(&layer->group, layer->ranks->comm, &config, layer->ranks->stream, NULL,
                             NULL));
}

// 2. What this rank sends, and a handle: the ranks exchange the routing, so all of them make it.
static void create_handle(Layer* layer) {
    static int64_t topk_idx[kMaxTokens * kTopK];
    static float weights[kMaxTokens * kTopK];
    const ncclEpGroup_t group = layer->group;
    const unsigned num = layer->num_tokens;
    const ncclEpTensorTag_t ids = NCCL_EP_TENSOR_TAG_TOPK_IDX, rows = NCCL_EP_TENSOR_TAG_TOKENS;
    const ncclEpTensorTag_t factors = NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS;
    layer->tokens = make_tensor(group, rows, ncclBfloat16, 2, num, kHidden, 1);
    layer->combined = make_tensor(group, rows, ncclBfloat16, 2, num, kHidden, 1);
    layer->topk_idx = make_tensor(group, ids, ncclInt64, 2, num, kTopK, 1);
    layer->weights = make_tensor(group, factors, ncclFloat32, 2, num, kTopK, 1);
    layer->combined_weights = make_tensor(group, factors, ncclFloat32, 2, num, kTopK, 1);
    for (unsigned n = 0; n < num * kTopK; ++n) {
        topk_idx[n] = expert_of(layer->ranks, n / kTopK, n % kTopK);
        weights[n] = weight_of(n / kTopK, n % kTopK);
    }
    upload(&layer->topk_idx, topk_idx, sizeof(topk_idx[0]) * num * kTopK);
    upload(&layer->weights, weights, sizeof(weights[0]) * num * kTopK);
    TRY_EP(ncclEpCreateHandle(&layer->handle, group, &layer->topk_idx, NULL, 0, NULL,
                              layer->ranks->stream, false));
}

static void* allocate(size_t count, size_t bytes) {
    void* memory = calloc(count > 0 ? count : 1, bytes);
    REQUIRE(memory != NULL);
    return memory;
}

// 3. What this rank receives. This call waits until the exchange of the routing is through.
static void create_rows(Layer* layer) {
    const ncclEpGroup_t group = layer->group;
    const ncclEpTensorTag_t ids = NCCL_EP_TENSOR_TAG_TOPK_IDX, rows = NCCL_EP_TENSOR_TAG_TOKENS;
    const ncclEpTensorTag_t factors = NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS;
    TRY_EP(ncclEpHandleGetNumRecvTokens(layer->handle, &layer->num_rows));
    const unsigned num = layer->num_rows;
    layer->rows = make_tensor(group, rows, ncclBfloat16, 2, num, kHidden, 1);
    layer->results = make_tensor(group, rows, ncclBfloat16, 2, num, kHidden, 1);
    layer->row_idx = make_tensor(group, ids, ncclInt64, 2, num, kTopK, 1);
    layer->row_weights = make_tensor(group, factors, ncclFloat32, 2, num, kTopK, 1);
    layer->result_weights = make_tensor(group, factors, ncclFloat32, 2, num, kTopK, 1);
    layer->host_rows = allocate((size_t)num * kHidden, sizeof(uint16_t));
    layer->host_gradients = allocate((size_t)num * kHidden, sizeof(uint16_t));
    layer->host_results = allocate((size_t)num * kHidden, sizeof(uint16_t));
    layer->host_idx = allocate((size_t)num * kTopK, sizeof(int64_t));
    layer->host_weights = allocate((size_t)num * kTopK, sizeof(float));
}

// ---- Experts

static float scale_of_local(const Layer* layer, int64_t local_expert) {
    return scale_of((int64_t)layer->ranks->rank * kExpertsPerRank + local_expert);
}

// results = input * (sum of weight * scale over the row's experts here). A row has the local ids of
// its experts first, then -1.
static void apply_experts(Layer* layer, const uint16_t* input) {
    for (unsigned row = 0; row < layer->num_rows; ++row) {
        float factor = 0.0f;
        for (unsigned n = row * kTopK; n < (row + 1) * kTopK && layer->host_idx[n] >= 0; ++n) {
            factor += layer->host_weights[n] * scale_of_local(layer, layer->host_idx[n]);
        }
        for (unsigned n = row * kHidden; n < (row + 1) * kHidden; ++n) {
            layer->host_results[n] = to_bf16(factor * from_bf16(input[n]));
        }
    }
    upload(&layer->results, layer->host_results, sizeof(uint16_t) * layer->num_rows * kHidden);
}

// The gradient of a weight: scale * (token . gradient of its output), packed as weights are.
static void apply_weight_gradients(Layer* layer) {
    for (unsigned row = 0; row < layer->num_rows; ++row) {
        float product = 0.0f;
        for (unsigned n = row * kHidden; n < (row + 1) * kHidden; ++n) {
            product += from_bf16(layer->host_rows[n]) * from_bf16(layer->host_gradients[n]);
        }
        for (unsigned n = row * kTopK; n < (row + 1) * kTopK; ++n) {
            const int64_t expert = layer->host_idx[n];
            layer->host_weights[n] = expert >= 0 ? scale_of_local(layer, expert) * product : 0.0f;
        }
    }
    upload(&layer->result_weights, layer->host_weights, sizeof(float) * layer->num_rows * kTopK);
}

// ---- Forward and backward

// 4. Tokens with weights and experts. A token arrives once on each rank that has experts of it.
static void dispatch(Layer* layer) {
    upload_tokens(layer, token_value);
    const ncclNDTensor_t* inputs[] = {&layer->tokens, &layer->weights, &layer->topk_idx};
    ncclNDTensor_t* outputs[] = {&layer->rows, &layer->row_weights, &layer->row_idx};
    TRY_EP(ncclEpDispatch(layer->handle, inputs, 3, outputs, 3, NULL, 0, 0, NULL,
                          layer->ranks->stream));
    TRY_CUDA(cudaStreamSynchronize(layer->ranks->stream));
    const size_t rows = layer->num_rows;
    download(layer->host_rows, &layer->rows, sizeof(uint16_t) * rows * kHidden);
    download(layer->host_idx, &layer->row_idx, sizeof(int64_t) * rows * kTopK);
    download(layer->host_weights, &layer->row_weights, sizeof(float) * rows * kTopK);
}

// 5. Sums, at each token's home, the results of all ranks.
static void combine(Layer* layer) {
    const ncclNDTensor_t* results[] = {&layer->results};
    ncclNDTensor_t* combined[] = {&layer->combined};
    TRY_EP(ncclEpCombine(layer->handle, results, 1, combined, 1, NULL, 0, 0, NULL,
                         layer->ranks->stream));
}

// 6. The gradient of combine is a dispatch of the outputs' gradients, of tokens only (cached).
static void dispatch_gradients(Layer* layer) {
    upload_tokens(layer, gradient_value);
    const ncclNDTensor_t* inputs[] = {&layer->tokens};
    ncclNDTensor_t* outputs[] = {&layer->rows};
    TRY_EP(ncclEpDispatch(layer->handle, inputs, 1, outputs, 1, NULL, 0, 0, NULL,
                          layer->ranks->stream));
    TRY_CUDA(cudaStreamSynchronize(layer->ranks->stream));
    download(layer->host_gradients, &layer->rows, sizeof(uint16_t) * layer->num_rows * kHidden);
}

// 7. The gradient of dispatch is a combine, which brings home the weights' gradients, too.
static void combine_gradients(Layer* layer) {
    const ncclNDTensor_t* results[] = {&layer->results, &layer->result_weights};
    ncclNDTensor_t* combined[] = {&layer->combined, &layer->combined_weights};
    TRY_EP(ncclEpCombine(layer->handle, results, 2, combined, 2, NULL, 0, 0, NULL,
                         layer->ranks->stream));
}

// ---- Checks

static int rows_are_right(const Layer* layer, Value value) {
    static uint16_t combined[kMaxTokens * kHidden];
    TRY_CUDA(cudaStreamSynchronize(layer->ranks->stream));
    download(combined, &layer->combined, sizeof(uint16_t) * layer->num_tokens * kHidden);
    for (unsigned n = 0; n < layer->num_tokens * kHidden; ++n) {
        const unsigned t = n / kHidden;
        float factor = 0;
        for (unsigned k = 0; k < kTopK; ++k) {
            factor += weight_of(t, k) * scale_of(expert_of(layer->ranks, t, k));
        }
        if (from_bf16(combined[n]) != factor * value(layer->ranks->rank, t, n % kHidden)) return 0;
    }
    return 1;
}

// Gradients of weights come back by ascending expert id, whatever the order in topk_idx.
static int weight_gradients_are_right(const Layer* layer) {
    static float actual[kMaxTokens * kTopK];
    const int rank = layer->ranks->rank;
    download(actual, &layer->combined_weights, sizeof(float) * layer->num_tokens * kTopK);
    for (unsigned t = 0; t < layer->num_tokens; ++t) {
        float product = 0.0f;
        for (unsigned i = 0; i < kHidden; ++i) {
            product += token_value(rank, t, i) * gradient_value(rank, t, i);
        }
        const int64_t a = expert_of(layer->ranks, t, 0);
        const int64_t b = expert_of(layer->ranks, t, 1);
        const float low = scale_of(a < b ? a : b) * product;
        const float high = scale_of(a < b ? b : a) * product;
        if (actual[t * kTopK] != low || actual[t * kTopK + 1] != high) return 0;
    }
    return 1;
}

// 8. Handles first, the group last.
static void destroy(Layer* layer) {
    ncclNDTensor_t* tensors[] = {
        &layer->tokens,      &layer->topk_idx,        &layer->weights,        &layer->rows,
        &layer->row_idx,     &layer->results,         &layer->result_weights, &layer->combined,
        &layer->row_weights, &layer->combined_weights};
    TRY_EP(ncclEpHandleDestroy(layer->handle));
    destroy_tensors(layer->group, tensors, sizeof(tensors) / sizeof(tensors[0]));
    TRY_EP(ncclEpGroupDestroy(layer->group, layer->ranks->stream));
    free(layer->host_rows);
    free(layer->host_gradients);
    free(layer->host_results);
    free(layer->host_idx);
    free(layer->host_weights);
}

int main(int argc, char** argv) {
    Ranks ranks = example_start(&argc, &argv);
    Layer layer = {.ranks = &ranks, .num_tokens = kMaxTokens - (unsigned)ranks.rank % kMaxTokens};
    create_group(&layer);
    create_handle(&layer);
    create_rows(&layer);

    dispatch(&layer);
    apply_experts(&layer, layer.host_rows);
    combine(&layer);
    int right = rows_are_right(&layer, token_value);

    dispatch_gradients(&layer);
    apply_experts(&layer, layer.host_gradients);
    apply_weight_gradients(&layer);
    combine_gradients(&layer);
    right = rows_are_right(&layer, gradient_value) && weight_gradients_are_right(&layer) && right;

    destroy(&layer);
    return example_finish(&ranks, right);
}
