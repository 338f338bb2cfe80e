// One low-latency dispatch and combine on two ranks, with nothing but the ten entry points of the
// first release: the program that the drop-in test links with a dummy library and then runs with
// the real one. All values are small integers, so every result is exact, and only what the first
// release promises is checked: the multiset of received rows, not their order.
#include "harness.h"

enum {
    kRanks = 2,
    kExpertsPerRank = 2,
    kExperts = kRanks * kExpertsPerRank,
    kTokens = 4,
    kTopK = 2,
    kHidden = 64,
    kSlots = kRanks * kTokens,
};

static const float kWeights[kTopK] = {1.0F, 2.0F};

static int64_t expert_of(int rank, int token, int k) { return (rank + token + k) % kExperts; }

// Column 0 tells rank and token; the others tell them apart from a shifted row.
static float element_of(int rank, int token, int column) {
    return (float)(rank * kTokens + token + column % 4);
}

typedef struct {
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    ncclNDTensor_t topk_idx;
    ncclNDTensor_t weights;
    ncclNDTensor_t tokens;
    ncclNDTensor_t received;
    ncclNDTensor_t counts;
    ncclNDTensor_t combined;
} Exchange;

static void open_exchange(Exchange* x, const EpEnv* env) {
    const unsigned row_bytes = kHidden * sizeof(uint16_t);
    x->group = ep_group_create(env, NCCL_EP_ALGO_LOW_LATENCY, kExperts, kTokens, row_bytes);
    x->topk_idx =
        ep_tensor_2d(x->group, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens, kTopK);
    x->weights =
        ep_tensor_2d(x->group, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, kTokens, kTopK);
    x->tokens = ep_tensor_2d(x->group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kTokens, kHidden);
    x->received = ep_tensor_3d(x->group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kExpertsPerRank,
                               kSlots, kHidden);
    x->counts = ep_tensor_1d(x->group, ncclInt32, NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE,
                             kExpertsPerRank);
    x->combined = ep_tensor_2d(x->group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kTokens, kHidden);

    int64_t topk_idx[kTokens][kTopK];
    float weights[kTokens][kTopK];
    uint16_t tokens[kTokens][kHidden];
    for (int t = 0; t < kTokens; ++t) {
        for (int k = 0; k < kTopK; ++k) {
            topk_idx[t][k] = expert_of(env->rank, t, k);
            weights[t][k] = kWeights[k];
        }
        for (int c = 0; c < kHidden; ++c) {
            tokens[t][c] = ep_bf16_from_f32(element_of(env->rank, t, c));
        }
    }
    ep_tensor_upload(&x->topk_idx, topk_idx);
    ep_tensor_upload(&x->weights, weights);
    ep_tensor_upload(&x->tokens, tokens);
    EP_REQUIRE_NCCL(ncclEpCreateHandle(&x->handle, x->group, &x->topk_idx, NULL, 0, NULL,
                                       env->stream, false));
}

static void close_exchange(Exchange* x, const EpEnv* env) {
    ncclNDTensor_t* tensors[] = {&x->topk_idx, &x->weights, &x->tokens,
                                 &x->received, &x->counts,  &x->combined};
    EP_CHECK_NCCL(ncclEpHandleDestroy(x->handle));
    for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); ++i) {
        EP_CHECK_NCCL(ncclEpTensorDestroy(x->group, tensors[i]));
    }
    EP_CHECK_NCCL(ncclEpGroupDestroy(x->group, env->stream));
}

static void dispatch(Exchange* x, const EpEnv* env) {
    const ncclNDTensor_t* inputs[] = {&x->tokens};
    ncclNDTensor_t* outputs[] = {&x->received};
    ncclNDTensor_t* locals[] = {&x->counts};
    const ncclEpDispatchConfig_t config = {0};
    EP_CHECK_NCCL(ncclEpDispatch(x->handle, inputs, 1, outputs, 1, locals, 1, 0, &config,
                                 env->stream));
    EP_CHECK_NCCL(ncclEpComplete(x->handle, NULL, env->stream));
    ep_sync(env);
}

static void combine(Exchange* x, const EpEnv* env) {
    const ncclNDTensor_t* inputs[] = {&x->received};
    ncclNDTensor_t* outputs[] = {&x->combined};
    ncclNDTensor_t* locals[] = {&x->weights};
    EP_CHECK_NCCL(ncclEpCombine(x->handle, inputs, 1, outputs, 1, locals, 1, 0, NULL, env->stream));
    EP_CHECK_NCCL(ncclEpComplete(x->handle, NULL, env->stream));
    ep_sync(env);
}

// How often the routing sends a token to an expert.
static int copies_sent(int rank, int token, int64_t expert) {
    int copies = 0;
    for (int k = 0; k < kTopK; ++k) copies += expert_of(rank, token, k) == expert;
    return copies;
}

static int copies_received(uint16_t rows[][kHidden], int num_rows, int rank, int token) {
    int copies = 0;
    for (int slot = 0; slot < num_rows; ++slot) {
        bool equal = true;
        for (int c = 0; c < kHidden; ++c) {
            equal = equal && ep_f32_from_bf16(rows[slot][c]) == element_of(rank, token, c);
        }
        copies += equal;
    }
    return copies;
}

// The experts of this exchange multiply each row by their number plus one, in place.
static void check_and_scale_rows(uint16_t rows[][kHidden], int num_rows, int64_t expert) {
    int expected_rows = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
        for (int token = 0; token < kTokens; ++token) {
            const int sent = copies_sent(rank, token, expert);
            EP_CHECK_EQ_I64(copies_received(rows, num_rows, rank, token), sent);
            expected_rows += sent;
        }
    }
    EP_CHECK_EQ_I64(num_rows, expected_rows);
    for (int slot = 0; slot < num_rows; ++slot) {
        for (int c = 0; c < kHidden; ++c) {
            const float value = ep_f32_from_bf16(rows[slot][c]);
            rows[slot][c] = ep_bf16_from_f32(value * (float)(expert + 1));
        }
    }
}

static void run_experts(Exchange* x, const EpEnv* env) {
    static uint16_t received[kExpertsPerRank][kSlots][kHidden];
    int32_t counts[kExpertsPerRank];
    ep_tensor_download(&x->received, received);
    ep_tensor_download(&x->counts, counts);
    for (int e = 0; e < kExpertsPerRank; ++e) {
        if (!EP_CHECK(counts[e] >= 0 && counts[e] <= kSlots)) continue;
        check_and_scale_rows(received[e], counts[e], env->rank * kExpertsPerRank + e);
    }
    ep_tensor_upload(&x->received, received);
}

static void check_combined(const Exchange* x, const EpEnv* env) {
    uint16_t combined[kTokens][kHidden];
    ep_tensor_download(&x->combined, combined);
    for (int t = 0; t < kTokens; ++t) {
        float factor = 0.0F;
        for (int k = 0; k < kTopK; ++k) {
            factor += kWeights[k] * (float)(expert_of(env->rank, t, k) + 1);
        }
        uint16_t expected[kHidden];
        for (int c = 0; c < kHidden; ++c) {
            expected[c] = ep_bf16_from_f32(factor * element_of(env->rank, t, c));
        }
        EP_CHECK_EQ_BYTES(combined[t], expected, sizeof(expected));
    }
}

static void low_latency_round_trip(EpEnv* env) {
    EP_REQUIRE(env->size == kRanks);
    Exchange exchange;
    open_exchange(&exchange, env);
    dispatch(&exchange, env);
    run_experts(&exchange, env);
    combine(&exchange, env);
    check_combined(&exchange, env);
    close_exchange(&exchange, env);
}

int main(int argc, char** argv) {
    static const EpCase cases[] = {EP_CASE(low_latency_round_trip)};
    return ep_main(argc, argv, cases, sizeof(cases) / sizeof(cases[0]));
}
