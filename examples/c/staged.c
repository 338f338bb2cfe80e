// Low latency with two micro-batches: while the rows of one travel, the experts of the other
// compute. Each half of the batch has a handle of its own, and each operation two parts: one call
// with send_only starts it, ncclEpComplete receives.
//
//   A: send |      | receive, experts, send back |                             | receive |
//   B:      | send |                             | receive, experts, send back |         | receive
//
// The experts here return what they get, and the weights of a token sum to 1: out[t] = x[t].
#include "example.h"

enum { kHidden = 64, kTopK = 2, kMaxTokens = 16, kExpertsPerRank = 2, kBatches = 2 };
enum { kSendOnly = 1 };

typedef struct {
    const Ranks* ranks;
    unsigned index, num_tokens;
    ncclEpHandle_t handle;
    ncclNDTensor_t tokens, topk_idx, weights;  // [num_tokens, ..]
    ncclNDTensor_t received, counter;          // [kExpertsPerRank, slots, kHidden], [..]
    ncclNDTensor_t combined;                   // [num_tokens, kHidden]
} Batch;

static ncclEpGroup_t create_group(const Ranks* ranks) {
    const ncclEpGroupConfig_t config = {
        .version = 1,
        .algorithm = NCCL_EP_ALGO_LOW_LATENCY,
        .num_experts = (unsigned)ranks->size * kExpertsPerRank,
        .max_tokens_per_rank = kMaxTokens,  // of one micro-batch
        .token_size_bytes = kHidden * sizeof(uint16_t),
    };
    ncclEpGroup_t group;
    TRY_EP(ncclEpCreateGroup(&group, ranks->comm, &config, ranks->stream, NULL, NULL));
    return group;
}

static float token_value(const Batch* batch, unsigned n) {
    return (float)(((unsigned)batch->ranks->rank + 7 * batch->index + n) % 64);
}

static void fill(Batch* batch) {
    static uint16_t tokens[kMaxTokens * kHidden];
    static int64_t topk_idx[kMaxTokens * kTopK];
    static float weights[kMaxTokens * kTopK];
    const unsigned num = batch->num_tokens;
    const unsigned num_experts = (unsigned)batch->ranks->size * kExpertsPerRank;
    for (unsigned n = 0; n < num * kHidden; ++n) tokens[n] = to_bf16(token_value(batch, n));
    for (unsigned n = 0; n < num * kTopK; ++n) {
        topk_idx[n] = (3 * (n / kTopK) + n % kTopK + batch->index) % num_experts;
        weights[n] = n % kTopK == 0 ? 0.25f : 0.75f;
    }
    upload(&batch->tokens, tokens, sizeof(tokens[0]) * num * kHidden);
    upload(&batch->topk_idx, topk_idx, sizeof(topk_idx[0]) * num * kTopK);
    upload(&batch->weights, weights, sizeof(weights[0]) * num * kTopK);
}

static Batch create_batch(const Ranks* ranks, ncclEpGroup_t group, unsigned index) {
    Batch batch = {.ranks = ranks, .index = index, .num_tokens = kMaxTokens - index};
    const unsigned tokens = batch.num_tokens;
    const unsigned slots = (unsigned)ranks->size * kMaxTokens;
    const ncclEpTensorTag_t rows = NCCL_EP_TENSOR_TAG_TOKENS;
    batch.tokens = make_tensor(group, rows, ncclBfloat16, 2, tokens, kHidden, 1);
    batch.combined = make_tensor(group, rows, ncclBfloat16, 2, tokens, kHidden, 1);
    batch.received = make_tensor(group, rows, ncclBfloat16, 3, kExpertsPerRank, slots, kHidden);
    batch.topk_idx =
        make_tensor(group, NCCL_EP_TENSOR_TAG_TOPK_IDX, ncclInt64, 2, tokens, kTopK, 1);
    batch.weights =
        make_tensor(group, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, ncclFloat32, 2, tokens, kTopK, 1);
    batch.counter = make_tensor(group, NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, ncclInt32, 1,
                                kExpertsPerRank, 1, 1);
    fill(&batch);
    TRY_EP(ncclEpCreateHandle(&batch.handle, group, &batch.topk_idx, NULL, 0, NULL, ranks->stream,
                              false));
    return batch;
}

static void destroy_batch(Batch* batch, ncclEpGroup_t group) {
    ncclNDTensor_t* tensors[] = {&batch->tokens,   &batch->topk_idx, &batch->weights,
                                 &batch->received, &batch->counter,  &batch->combined};
    TRY_EP(ncclEpHandleDestroy(batch->handle));
    destroy_tensors(group, tensors, sizeof(tensors) / sizeof(tensors[0]));
}

// Starts to send. A group holds two staged operations at a time, one for each batch.
static void send_tokens(Batch* batch) {
    const ncclNDTensor_t* inputs[] = {&batch->tokens};
    ncclNDTensor_t* outputs[] = {&batch->received};
    ncclNDTensor_t* locals[] = {&batch->counter};
    TRY_EP(ncclEpDispatch(batch->handle, inputs, 1, outputs, 1, locals, 1, kSendOnly, NULL,
                          batch->ranks->stream));
}

static void send_results(Batch* batch) {
    const ncclNDTensor_t* inputs[] = {&batch->received};
    ncclNDTensor_t* outputs[] = {&batch->combined};
    ncclNDTensor_t* locals[] = {&batch->weights};
    TRY_EP(ncclEpCombine(batch->handle, inputs, 1, outputs, 1, locals, 1, kSendOnly, NULL,
                         batch->ranks->stream));
}

// The outputs are valid from here on in the stream. No call waits on the host.
static void receive(Batch* batch) {
    TRY_EP(ncclEpComplete(batch->handle, NULL, batch->ranks->stream));
}

static void apply_experts(Batch* batch) { (void)batch; /* kernels of yours, on the same stream */ }

static int is_right(const Batch* batch) {
    static uint16_t combined[kMaxTokens * kHidden];
    const unsigned elements = batch->num_tokens * kHidden;
    download(combined, &batch->combined, sizeof(uint16_t) * elements);
    for (unsigned n = 0; n < elements; ++n) {
        if (from_bf16(combined[n]) != token_value(batch, n)) return 0;
    }
    return 1;
}

int main(int argc, char** argv) {
    Ranks ranks = example_start(&argc, &argv);
    ncclEpGroup_t group = create_group(&ranks);
    Batch batches[kBatches];
    for (unsigned i = 0; i < kBatches; ++i) batches[i] = create_batch(&ranks, group, i);

    for (unsigned i = 0; i < kBatches; ++i) send_tokens(&batches[i]);
    for (unsigned i = 0; i < kBatches; ++i) {
        receive(&batches[i]);  // while the next batch travels
        apply_experts(&batches[i]);
        send_results(&batches[i]);
    }
    for (unsigned i = 0; i < kBatches; ++i) receive(&batches[i]);
    TRY_CUDA(cudaStreamSynchronize(ranks.stream));

    const int right = is_right(&batches[0]) && is_right(&batches[1]);
    for (unsigned i = 0; i < kBatches; ++i) destroy_batch(&batches[i], group);
    TRY_EP(ncclEpGroupDestroy(group, ranks.stream));
    return example_finish(&ranks, right);
}
