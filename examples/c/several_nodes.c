// Several nodes: the calls are those of one node. What a program adds is care for a rank that is
// lost: an operation that waits too long ends, with a text, and the process goes on.
//
//   mpirun -np 16 --hostfile hosts --map-by ppr:8:node -x NCCL_SOCKET_IFNAME=eth0 several_nodes
//   mpirun -np 4 scripts/on_nodes.sh 2 ./several_nodes    # this machine plays two nodes
//
// Every rank sends its tokens to an expert of each other rank, the experts here return what they
// get, and a token's result is the sum over its experts: out[t] = K * x[t].
#define _POSIX_C_SOURCE 199309L  // for nanosleep
#include <time.h>

#include "example.h"

enum { kHidden = 64, kMostTopK = 8, kTokens = 24 };

typedef struct {
    const Ranks* ranks;
    unsigned top_k, num_rows;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    ncclNDTensor_t tokens, topk_idx, weights;   // [kTokens, ..]
    ncclNDTensor_t rows, row_idx, row_weights;  // [num_rows, ..]
    ncclNDTensor_t combined;                    // [kTokens, kHidden]
} Layer;

static float token_value(int rank, unsigned n) { return (float)(((unsigned)rank + n) % 16); }

// Waits for the stream, and looks at the group meanwhile. NCCL_EP_TIMEOUT_MS is the deadline of
// every wait for another rank; the default of 100 seconds is long for a service.
static void wait_for(const Layer* layer) {
    const struct timespec pause = {.tv_nsec = 1000000};
    cudaError_t state = cudaErrorNotReady;
    while (state == cudaErrorNotReady) {
        ncclResult_t failure = ncclSuccess;
        TRY_EP(ncclEpGetAsyncError(layer->group, &failure));
        // Here a service would destroy the group, and make another on the ranks that remain.
        if (failure != ncclSuccess) example_fail("the group has failed", ncclEpGetLastError());
        nanosleep(&pause, NULL);
        state = cudaStreamQuery(layer->ranks->stream);
    }
    TRY_CUDA(state);
}

static void create_group(Layer* layer) {
    const ncclEpGroupConfig_t config = {
        .version = 1,
        .algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT,
        .num_experts = (unsigned)layer->ranks->size,  // one on each rank
        .max_tokens_per_rank = kTokens,
        .token_size_bytes = kHidden * sizeof(uint16_t),
    };
    TRY_EP(ncclEpCreateGroup(&layer->group, layer->ranks->comm, &config, layer->ranks->stream, NULL,
                             NULL));
}

// Handles are made in one order on all ranks. Over several nodes this call waits for the network.
static void create_handle(Layer* layer) {
    static uint16_t tokens[kTokens * kHidden];
    static int64_t topk_idx[kTokens * kMostTopK];
    static float weights[kTokens * kMostTopK];
    const ncclEpGroup_t group = layer->group;
    const unsigned size = (unsigned)layer->ranks->size, k = layer->top_k;
    layer->tokens =
        make_tensor(group, NCCL_EP_TENSOR_TAG_TOKENS, ncclBfloat16, 2, kTokens, kHidden, 1);
    layer->combined =
        make_tensor(group, NCCL_EP_TENSOR_TAG_TOKENS, ncclBfloat16, 2, kTokens, kHidden, 1);
    layer->topk_idx = make_tensor(group, NCCL_EP_TENSOR_TAG_TOPK_IDX, ncclInt64, 2, kTokens, k, 1);
    layer->weights =
        make_tensor(group, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, ncclFloat32, 2, kTokens, k, 1);
    for (unsigned n = 0; n < kTokens * kHidden; ++n) {
        tokens[n] = to_bf16(token_value(layer->ranks->rank, n));
    }
    for (unsigned n = 0; n < kTokens * k; ++n) {
        topk_idx[n] = ((unsigned)layer->ranks->rank + 1 + n % k) % size;
        weights[n] = 1;
    }
    upload(&layer->tokens, tokens, sizeof(tokens));
    upload(&layer->topk_idx, topk_idx, sizeof(topk_idx[0]) * kTokens * k);
    upload(&layer->weights, weights, sizeof(weights[0]) * kTokens * k);
    TRY_EP(ncclEpCreateHandle(&layer->handle, group, &layer->topk_idx, NULL, 0, NULL,
                              layer->ranks->stream, false));
}

static void create_rows(Layer* layer) {
    const ncclEpGroup_t group = layer->group;
    TRY_EP(ncclEpHandleGetNumRecvTokens(layer->handle, &layer->num_rows));
    const unsigned rows = layer->num_rows, k = layer->top_k;
    layer->rows = make_tensor(group, NCCL_EP_TENSOR_TAG_TOKENS, ncclBfloat16, 2, rows, kHidden, 1);
    layer->row_idx = make_tensor(group, NCCL_EP_TENSOR_TAG_TOPK_IDX, ncclInt64, 2, rows, k, 1);
    layer->row_weights =
        make_tensor(group, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, ncclFloat32, 2, rows, k, 1);
}

static void dispatch_and_combine(Layer* layer) {
    const cudaStream_t stream = layer->ranks->stream;
    const ncclNDTensor_t* inputs[] = {&layer->tokens, &layer->topk_idx, &layer->weights};
    ncclNDTensor_t* outputs[] = {&layer->rows, &layer->row_idx, &layer->row_weights};
    TRY_EP(ncclEpDispatch(layer->handle, inputs, 3, outputs, 3, NULL, 0, 0, NULL, stream));
    const ncclNDTensor_t* results[] = {&layer->rows};
    ncclNDTensor_t* combined[] = {&layer->combined};
    TRY_EP(ncclEpCombine(layer->handle, results, 1, combined, 1, NULL, 0, 0, NULL, stream));
}

static int is_right(const Layer* layer) {
    static uint16_t combined[kTokens * kHidden];
    download(combined, &layer->combined, sizeof(combined));
    for (unsigned n = 0; n < kTokens * kHidden; ++n) {
        const float expected = (float)layer->top_k * token_value(layer->ranks->rank, n);
        if (from_bf16(combined[n]) != expected) return 0;
    }
    return 1;
}

static void destroy(Layer* layer) {
    ncclNDTensor_t* tensors[] = {&layer->tokens,  &layer->topk_idx,    &layer->weights,
                                 &layer->rows,    &layer->row_idx,     &layer->row_weights,
                                 &layer->combined};
    TRY_EP(ncclEpHandleDestroy(layer->handle));
    destroy_tensors(layer->group, tensors, sizeof(tensors) / sizeof(tensors[0]));
    TRY_EP(ncclEpGroupDestroy(layer->group, layer->ranks->stream));
}

int main(int argc, char** argv) {
    Ranks ranks = example_start(&argc, &argv);
    const unsigned others = ranks.size > 1 ? (unsigned)ranks.size - 1 : 1;
    Layer layer = {.ranks = &ranks, .top_k = others < kMostTopK ? others : kMostTopK};
    create_group(&layer);
    create_handle(&layer);
    create_rows(&layer);
    dispatch_and_combine(&layer);
    wait_for(&layer);
    const int right = is_right(&layer);
    destroy(&layer);
    return example_finish(&ranks, right);
}
