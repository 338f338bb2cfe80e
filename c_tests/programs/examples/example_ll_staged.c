// Example: one MoE layer in low-latency (LL) mode with staged operations.
//
//   out[t] = shared * x[t] + sum over the experts e of token t of weight(t, e) * scale(e) * x[t]
//
// A staged operation only starts the transfer; ncclEpComplete finishes it. In between there is time
// for work that does not wait for other ranks: here an expert that all tokens share and that every
// rank has. Multiplying by scale(e) stands for an expert's network. It is done on the host, with
// numbers so small that bf16 holds every result exactly: the program compares bit for bit.
// Run it with `mpirun -np 8 example_ll_staged`. Names with ep_ or EP_ are from harness/harness.h;
// ep_tensor_1d, _2d and _3d call ncclEpTensorCreate.
#include <stdlib.h>

#include "harness/harness.h"

enum { kHidden = 64, kTopK = 2, kMaxTokens = 32, kExpertsPerRank = 2, kSendOnly = 1 };
enum { kSharedScale = 2 };

typedef struct {
    const EpEnv* env;     // rank, number of ranks, communicator, stream
    unsigned num_tokens;  // of this rank; it differs from rank to rank
    unsigned num_slots;   // for each local expert: enough for every token of every rank
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    ncclNDTensor_t tokens, topk_idx, weights;  // [num_tokens, ...]
    ncclNDTensor_t received, results;          // [kExpertsPerRank, num_slots, kHidden]
    ncclNDTensor_t counter;                    // [kExpertsPerRank]: slots in use
    ncclNDTensor_t combined;                   // [num_tokens, kHidden]
} Layer;

// ---- The numbers of the example -----------------------------------------------------------------

static float token_value(int rank, unsigned t, unsigned i) {
    return (float)(((unsigned)rank + 2 * t + i) % 16);
}
static float expert_scale(int64_t expert) { return (float)(1 + expert % 4); }
static float weight_of(unsigned t, unsigned k) { return (t + k) % 2 == 0 ? 0.25f : 0.75f; }

// Two different experts for each token.
static int64_t expert_of(const EpEnv* env, unsigned t, unsigned k) {
    const unsigned num_experts = (unsigned)env->size * kExpertsPerRank;
    const unsigned first = (5 * (unsigned)env->rank + 3 * t) % num_experts;
    return (first + k * (1 + t % (num_experts - 1))) % num_experts;
}

// STEP 1: a group. It serves all layers of a model and holds the buffers that they share.
static void create_group(Layer* layer) {
    const ncclEpGroupConfig_t config = {
        .version = 1,
        .algorithm = NCCL_EP_ALGO_LOW_LATENCY,
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

static void create_tensors(Layer* layer) {
    const unsigned tokens = layer->num_tokens;
    const unsigned slots = layer->num_slots;
    const ncclEpGroup_t group = layer->group;
    layer->tokens = ep_tensor_2d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, tokens, kHidden);
    layer->topk_idx = ep_tensor_2d(group, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, tokens, kTopK);
    layer->weights =
        ep_tensor_2d(group, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, tokens, kTopK);
    layer->received = ep_tensor_3d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kExpertsPerRank,
                                   slots, kHidden);
    layer->results = ep_tensor_3d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kExpertsPerRank,
                                  slots, kHidden);
    layer->counter = ep_tensor_1d(group, ncclInt32, NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE,
                                  kExpertsPerRank);
    layer->combined = ep_tensor_2d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, tokens, kHidden);
}

// STEP 2: the tokens of this rank with their experts and weights, and a handle for this routing.
// topk_idx has to stay alive as long as the handle is in use.
static void create_handle(Layer* layer) {
    uint16_t tokens[kMaxTokens * kHidden];
    int64_t topk_idx[kMaxTokens * kTopK];
    float weights[kMaxTokens * kTopK];
    for (unsigned n = 0; n < layer->num_tokens * kHidden; ++n) {
        tokens[n] = ep_bf16_from_f32(token_value(layer->env->rank, n / kHidden, n % kHidden));
    }
    for (unsigned n = 0; n < layer->num_tokens * kTopK; ++n) {
        topk_idx[n] = expert_of(layer->env, n / kTopK, n % kTopK);
        weights[n] = weight_of(n / kTopK, n % kTopK);
    }
    ep_tensor_upload(&layer->tokens, tokens);
    ep_tensor_upload(&layer->topk_idx, topk_idx);
    ep_tensor_upload(&layer->weights, weights);
    EP_REQUIRE_NCCL(ncclEpCreateHandle(&layer->handle, layer->group, &layer->topk_idx, NULL, 0,
                                       NULL, layer->env->stream, false));
}

// STEP 3: start the dispatch. The call returns at once while the tokens travel.
static void start_dispatch(Layer* layer) {
    const ncclNDTensor_t* inputs[] = {&layer->tokens};
    ncclNDTensor_t* outputs[] = {&layer->received};
    ncclNDTensor_t* locals[] = {&layer->counter};
    const ncclEpDispatchConfig_t config = {.round_scales = 0};
    EP_REQUIRE_NCCL(ncclEpDispatch(layer->handle, inputs, 1, outputs, 1, locals, 1, kSendOnly,
                                   &config, layer->env->stream));
}

// STEP 4: work of this rank while the tokens travel: the expert that all tokens share.
static void apply_shared_expert(const Layer* layer, float* shared) {
    for (unsigned n = 0; n < layer->num_tokens * kHidden; ++n) {
        shared[n] = kSharedScale * token_value(layer->env->rank, n / kHidden, n % kHidden);
    }
}

// STEP 5 and STEP 8: complete the staged operation. The outputs are valid once the stream reaches
// this point.
static void complete(const Layer* layer) {
    const ncclEpCompleteConfig_t config = {0};
    EP_REQUIRE_NCCL(ncclEpComplete(layer->handle, &config, layer->env->stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(layer->env->stream));
}

// STEP 6: the experts of this rank. The rows of expert e fill its slots 0 .. counter[e] - 1. They
// carry no weights; combine applies these at home. Returns the number of rows.
static uint64_t apply_experts(const Layer* layer) {
    int32_t counts[kExpertsPerRank];
    uint64_t num_rows = 0;
    uint16_t* slots = malloc(ep_tensor_bytes(&layer->received));
    EP_REQUIRE(slots != NULL);
    ep_tensor_download(&layer->counter, counts);
    ep_tensor_download(&layer->received, slots);
    for (unsigned e = 0; e < kExpertsPerRank; ++e) {
        EP_REQUIRE(counts[e] >= 0 && (unsigned)counts[e] <= layer->num_slots);
        const float scale = expert_scale((int64_t)layer->env->rank * kExpertsPerRank + e);
        uint16_t* rows = &slots[(size_t)e * layer->num_slots * kHidden];
        for (size_t n = 0; n < (size_t)counts[e] * kHidden; ++n) {
            rows[n] = ep_bf16_from_f32(scale * ep_f32_from_bf16(rows[n]));
        }
        num_rows += (uint64_t)counts[e];
    }
    ep_tensor_upload(&layer->results, slots);
    free(slots);
    return num_rows;
}

// STEP 7: start the combine. Other work could be done while the results travel home.
static void start_combine(Layer* layer) {
    const ncclNDTensor_t* inputs[] = {&layer->results};
    ncclNDTensor_t* outputs[] = {&layer->combined};
    ncclNDTensor_t* locals[] = {&layer->weights};
    EP_REQUIRE_NCCL(ncclEpCombine(layer->handle, inputs, 1, outputs, 1, locals, 1, kSendOnly, NULL,
                                  layer->env->stream));
}

// STEP 9: download the layer's output and check it.
static void check_output(const Layer* layer, const float* shared) {
    uint16_t combined[kMaxTokens * kHidden];
    float output[kMaxTokens * kHidden];
    float expected[kMaxTokens * kHidden];
    ep_tensor_download(&layer->combined, combined);
    for (unsigned n = 0; n < layer->num_tokens * kHidden; ++n) {
        const unsigned t = n / kHidden;
        float factor = kSharedScale;
        for (unsigned k = 0; k < kTopK; ++k) {
            factor += weight_of(t, k) * expert_scale(expert_of(layer->env, t, k));
        }
        output[n] = shared[n] + ep_f32_from_bf16(combined[n]);
        expected[n] = factor * token_value(layer->env->rank, t, n % kHidden);
    }
    EP_CHECK_EQ_BYTES(output, expected, layer->num_tokens * kHidden * sizeof(float));
}

// Every token has been received once for each of its experts.
static void check_num_rows(const Layer* layer, uint64_t num_rows) {
    uint64_t received = num_rows;
    uint64_t sent = layer->num_tokens * kTopK;
    MPI_Allreduce(MPI_IN_PLACE, &received, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, &sent, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    EP_CHECK_EQ_U64(received, sent);
}

// STEP 10: release the handle, the tensors and, last, the group.
static void release(Layer* layer) {
    ncclNDTensor_t* tensors[] = {&layer->tokens,   &layer->topk_idx, &layer->weights,
                                 &layer->received, &layer->results,  &layer->counter,
                                 &layer->combined};
    EP_REQUIRE_NCCL(ncclEpHandleDestroy(layer->handle));
    for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); ++i) {
        EP_REQUIRE_NCCL(ncclEpTensorDestroy(layer->group, tensors[i]));
    }
    EP_REQUIRE_NCCL(ncclEpGroupDestroy(layer->group, layer->env->stream));
}

int main(int argc, char** argv) {
    EpEnv env;
    ep_init(&env, &argc, &argv);
    Layer layer = {.env = &env,
                   .num_tokens = kMaxTokens - (unsigned)env.rank % kMaxTokens,
                   .num_slots = (unsigned)env.size * kMaxTokens};
    create_group(&layer);
    create_tensors(&layer);
    create_handle(&layer);
    float shared[kMaxTokens * kHidden];

    start_dispatch(&layer);
    apply_shared_expert(&layer, shared);
    complete(&layer);
    const uint64_t num_rows = apply_experts(&layer);
    start_combine(&layer);
    complete(&layer);

    check_num_rows(&layer, num_rows);
    check_output(&layer, shared);
    release(&layer);
    return ep_finish(&env);
}
