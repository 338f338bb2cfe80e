// Example: one MoE layer in high-throughput (HT) mode, forward and backward.
//
//   out[t] = sum over the experts e of token t of weight(t, e) * scale(e) * x[t]
//
// Multiplying by scale(e) stands for the expert's network. It is done on the host, with numbers so
// small that bf16 holds every result exactly: the program compares its gradients bit for bit.
// Run it with `mpirun -np 8 example_ht`. Names with ep_ or EP_ are from harness/harness.h;
// ep_tensor_2d calls ncclEpTensorCreate for two sizes.
#include <stdlib.h>

#include "harness/harness.h"

enum { kHidden = 64, kTopK = 2, kMaxTokens = 32, kExpertsPerRank = 2 };

typedef struct {
    const EpEnv* env;     // rank, number of ranks, communicator, stream
    unsigned num_tokens;  // of this rank; it differs from rank to rank
    unsigned num_rows;    // room for the rows that this rank may receive
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    ncclNDTensor_t tokens, topk_idx, weights;   // what this rank sends
    ncclNDTensor_t rows, row_idx, row_weights;  // what this rank receives
    ncclNDTensor_t results, result_weights;     // what it sends back
    ncclNDTensor_t combined, combined_weights;  // what comes home
    // The rows on the host, where the experts of this example compute.
    uint16_t *host_tokens, *host_gradients, *host_results;
    int64_t* host_idx;
    float* host_weights;
} Layer;

// ---- The numbers of the example -----------------------------------------------------------------

static float token_value(int rank, unsigned t, unsigned i) {
    return (float)(((unsigned)rank + 2 * t + i) % 16);
}
static float gradient_value(int rank, unsigned t, unsigned i) {
    return (float)((3 * (unsigned)rank + t + 5 * i) % 8);
}
static float expert_scale(int64_t expert) { return (float)(1 + expert % 4); }
static float weight_of(unsigned t, unsigned k) { return (t + k) % 2 == 0 ? 0.25f : 0.75f; }

// Two different experts for each token, in either order.
static int64_t expert_of(const EpEnv* env, unsigned t, unsigned k) {
    const unsigned num_experts = (unsigned)env->size * kExpertsPerRank;
    const unsigned first = (5 * (unsigned)env->rank + 3 * t) % num_experts;
    return (first + k * (1 + t % (num_experts - 1))) % num_experts;
}

// weight * scale, summed over the experts of a token.
static float factor_of(const EpEnv* env, unsigned t) {
    float factor = 0.0f;
    for (unsigned k = 0; k < kTopK; ++k) {
        factor += weight_of(t, k) * expert_scale(expert_of(env, t, k));
    }
    return factor;
}

static void upload_values(const Layer* layer, float (*value)(int, unsigned, unsigned)) {
    uint16_t host[kMaxTokens * kHidden];
    for (unsigned n = 0; n < layer->num_tokens * kHidden; ++n) {
        host[n] = ep_bf16_from_f32(value(layer->env->rank, n / kHidden, n % kHidden));
    }
    ep_tensor_upload(&layer->tokens, host);
}

// ---- Preparation --------------------------------------------------------------------------------

// STEP 1: a group. It serves all layers of a model and holds the buffers that they share.
static void create_group(Layer* layer) {
    const ncclEpGroupConfig_t config = {
        .version = 1,
        .algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT,
        .num_experts = (unsigned)layer->env->size * kExpertsPerRank,
        .max_tokens_per_rank = kMaxTokens,
        .token_size_bytes = kHidden * sizeof(uint16_t),
        .rdma_buffer_size = NCCL_EP_AUTO,
        .num_qp_per_rank = NCCL_EP_AUTO,
        .num_channels = NCCL_EP_AUTO,
    };
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&layer->group, layer->env->comm, &config, layer->env->stream,
                                      NULL, NULL));
}

// STEP 2: the tensors of this rank's tokens, and a handle. Creating the handle exchanges the
// routing, so all ranks do it together; afterwards the bound of the received rows is known.
static void create_handle(Layer* layer) {
    const unsigned tokens = layer->num_tokens;
    const ncclEpGroup_t group = layer->group;
    layer->tokens = ep_tensor_2d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, tokens, kHidden);
    layer->topk_idx = ep_tensor_2d(group, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, tokens, kTopK);
    layer->weights =
        ep_tensor_2d(group, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, tokens, kTopK);
    layer->combined = ep_tensor_2d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, tokens, kHidden);
    layer->combined_weights =
        ep_tensor_2d(group, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, tokens, kTopK);

    int64_t topk_idx[kMaxTokens * kTopK];
    float weights[kMaxTokens * kTopK];
    for (unsigned n = 0; n < tokens * kTopK; ++n) {
        topk_idx[n] = expert_of(layer->env, n / kTopK, n % kTopK);
        weights[n] = weight_of(n / kTopK, n % kTopK);
    }
    ep_tensor_upload(&layer->topk_idx, topk_idx);
    ep_tensor_upload(&layer->weights, weights);

    EP_REQUIRE_NCCL(ncclEpCreateHandle(&layer->handle, group, &layer->topk_idx, NULL, 0, NULL,
                                       layer->env->stream, false));
    EP_REQUIRE_NCCL(ncclEpHandleGetNumRecvTokens(layer->handle, &layer->num_rows));
}

static void create_rows(Layer* layer) {
    const unsigned rows = layer->num_rows;
    const ncclEpGroup_t group = layer->group;
    layer->rows = ep_tensor_2d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, rows, kHidden);
    layer->row_idx = ep_tensor_2d(group, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, rows, kTopK);
    layer->row_weights =
        ep_tensor_2d(group, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, rows, kTopK);
    layer->results = ep_tensor_2d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, rows, kHidden);
    layer->result_weights =
        ep_tensor_2d(group, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, rows, kTopK);
    layer->host_tokens = calloc((size_t)rows * kHidden, sizeof(uint16_t));
    layer->host_gradients = calloc((size_t)rows * kHidden, sizeof(uint16_t));
    layer->host_results = calloc((size_t)rows * kHidden, sizeof(uint16_t));
    layer->host_idx = calloc((size_t)rows * kTopK, sizeof(int64_t));
    layer->host_weights = calloc((size_t)rows * kTopK, sizeof(float));
    EP_REQUIRE(layer->host_tokens != NULL && layer->host_gradients != NULL);
    EP_REQUIRE(layer->host_results != NULL && layer->host_idx != NULL);
    EP_REQUIRE(layer->host_weights != NULL);
}

// ---- Experts ------------------------------------------------------------------------------------

static float scale_of_local(const Layer* layer, int64_t local_expert) {
    return expert_scale((int64_t)layer->env->rank * kExpertsPerRank + local_expert);
}

// results = input * (sum of weight * scale over the row's experts on this rank). A row names its
// experts by local ids, packed to the left and followed by -1; an unused row has -1 only.
static void apply_experts(Layer* layer, const uint16_t* input) {
    for (unsigned row = 0; row < layer->num_rows; ++row) {
        float factor = 0.0f;
        for (unsigned n = row * kTopK; n < (row + 1) * kTopK && layer->host_idx[n] >= 0; ++n) {
            factor += layer->host_weights[n] * scale_of_local(layer, layer->host_idx[n]);
        }
        for (unsigned n = row * kHidden; n < (row + 1) * kHidden; ++n) {
            layer->host_results[n] = ep_bf16_from_f32(factor * ep_f32_from_bf16(input[n]));
        }
    }
    ep_tensor_upload(&layer->results, layer->host_results);
}

// The gradient of each weight: scale * (token . gradient of the token's output), in the same packed
// order as the weights have.
static void apply_weight_gradients(Layer* layer) {
    for (unsigned row = 0; row < layer->num_rows; ++row) {
        float product = 0.0f;
        for (unsigned n = row * kHidden; n < (row + 1) * kHidden; ++n) {
            product += ep_f32_from_bf16(layer->host_tokens[n]) *
                       ep_f32_from_bf16(layer->host_gradients[n]);
        }
        for (unsigned n = row * kTopK; n < (row + 1) * kTopK; ++n) {
            const int64_t expert = layer->host_idx[n];
            layer->host_weights[n] = expert >= 0 ? scale_of_local(layer, expert) * product : 0.0f;
        }
    }
    ep_tensor_upload(&layer->result_weights, layer->host_weights);
}

// ---- Forward ------------------------------------------------------------------------------------

static void check_combined(const Layer* layer, float (*value)(int, unsigned, unsigned)) {
    uint16_t actual[kMaxTokens * kHidden];
    uint16_t expected[kMaxTokens * kHidden];
    ep_tensor_download(&layer->combined, actual);
    for (unsigned n = 0; n < layer->num_tokens * kHidden; ++n) {
        expected[n] = ep_bf16_from_f32(factor_of(layer->env, n / kHidden) *
                                       value(layer->env->rank, n / kHidden, n % kHidden));
    }
    EP_CHECK_EQ_BYTES(actual, expected, ep_tensor_bytes(&layer->combined));
}

static void forward(Layer* layer) {
    const cudaStream_t stream = layer->env->stream;

    // STEP 3: dispatch tokens with their weights and experts. Each token arrives once on every rank
    // that has one of its experts.
    upload_values(layer, token_value);
    const ncclNDTensor_t* inputs[] = {&layer->tokens, &layer->weights, &layer->topk_idx};
    ncclNDTensor_t* outputs[] = {&layer->rows, &layer->row_weights, &layer->row_idx};
    const ncclEpDispatchConfig_t config = {.round_scales = 0};
    EP_REQUIRE_NCCL(
        ncclEpDispatch(layer->handle, inputs, 3, outputs, 3, NULL, 0, 0, &config, stream));
    EP_REQUIRE_NCCL(ncclEpComplete(layer->handle, NULL, stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(stream));

    // STEP 4: the experts, with the weights.
    ep_tensor_download(&layer->rows, layer->host_tokens);
    ep_tensor_download(&layer->row_idx, layer->host_idx);
    ep_tensor_download(&layer->row_weights, layer->host_weights);
    apply_experts(layer, layer->host_tokens);

    // STEP 5: combine sums, at each token's home, the results of all ranks.
    const ncclNDTensor_t* results[] = {&layer->results};
    ncclNDTensor_t* combined[] = {&layer->combined};
    EP_REQUIRE_NCCL(
        ncclEpCombine(layer->handle, results, 1, combined, 1, NULL, 0, 0, NULL, stream));
    EP_REQUIRE_NCCL(ncclEpComplete(layer->handle, NULL, stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(stream));
    check_combined(layer, token_value);
}

// ---- Backward -----------------------------------------------------------------------------------

// Combine returns the gradients of the weights by ascending expert id, whatever the order in
// topk_idx.
static void check_weight_gradients(const Layer* layer) {
    float actual[kMaxTokens * kTopK];
    float expected[kMaxTokens * kTopK];
    ep_tensor_download(&layer->combined_weights, actual);
    for (unsigned t = 0; t < layer->num_tokens; ++t) {
        float product = 0.0f;
        for (unsigned i = 0; i < kHidden; ++i) {
            product += token_value(layer->env->rank, t, i) * gradient_value(layer->env->rank, t, i);
        }
        const int64_t a = expert_of(layer->env, t, 0);
        const int64_t b = expert_of(layer->env, t, 1);
        expected[t * kTopK] = expert_scale(a < b ? a : b) * product;
        expected[t * kTopK + 1] = expert_scale(a < b ? b : a) * product;
    }
    EP_CHECK_EQ_BYTES(actual, expected, ep_tensor_bytes(&layer->combined_weights));
}

static void backward(Layer* layer) {
    const cudaStream_t stream = layer->env->stream;

    // STEP 6: the gradient of combine is a dispatch of the outputs' gradients. It sends tokens only
    // and follows the handle's routing.
    upload_values(layer, gradient_value);
    const ncclNDTensor_t* inputs[] = {&layer->tokens};
    ncclNDTensor_t* outputs[] = {&layer->rows};
    const ncclEpDispatchConfig_t config = {.round_scales = 0};
    EP_REQUIRE_NCCL(
        ncclEpDispatch(layer->handle, inputs, 1, outputs, 1, NULL, 0, 0, &config, stream));
    EP_REQUIRE_NCCL(ncclEpComplete(layer->handle, NULL, stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(stream));

    // STEP 7: the experts' gradients, for tokens and for weights.
    ep_tensor_download(&layer->rows, layer->host_gradients);
    apply_experts(layer, layer->host_gradients);
    apply_weight_gradients(layer);

    // STEP 8: the gradient of dispatch is a combine, which brings home the weights' gradients too.
    const ncclNDTensor_t* results[] = {&layer->results, &layer->result_weights};
    ncclNDTensor_t* combined[] = {&layer->combined, &layer->combined_weights};
    EP_REQUIRE_NCCL(
        ncclEpCombine(layer->handle, results, 2, combined, 2, NULL, 0, 0, NULL, stream));
    EP_REQUIRE_NCCL(ncclEpComplete(layer->handle, NULL, stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(stream));
    check_combined(layer, gradient_value);
    check_weight_gradients(layer);
}

// STEP 9: release the handle, the tensors and, last, the group.
static void release(Layer* layer) {
    ncclNDTensor_t* tensors[] = {
        &layer->tokens,      &layer->topk_idx,        &layer->weights,        &layer->rows,
        &layer->row_idx,     &layer->results,         &layer->result_weights, &layer->combined,
        &layer->row_weights, &layer->combined_weights};
    EP_REQUIRE_NCCL(ncclEpHandleDestroy(layer->handle));
    for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); ++i) {
        EP_REQUIRE_NCCL(ncclEpTensorDestroy(layer->group, tensors[i]));
    }
    EP_REQUIRE_NCCL(ncclEpGroupDestroy(layer->group, layer->env->stream));
    free(layer->host_tokens);
    free(layer->host_gradients);
    free(layer->host_results);
    free(layer->host_idx);
    free(layer->host_weights);
}

int main(int argc, char** argv) {
    EpEnv env;
    ep_init(&env, &argc, &argv);
    Layer layer = {.env = &env, .num_tokens = kMaxTokens - (unsigned)env.rank % kMaxTokens};
    create_group(&layer);
    create_handle(&layer);
    create_rows(&layer);
    forward(&layer);
    backward(&layer);
    release(&layer);
    return ep_finish(&env);
}
