// A decode step in a CUDA graph: captured once, replayed with new tokens and new experts.
//
// The experts here return what they get, and the weights of a token sum to 1: out[t] = x[t].
// Where no stream can be captured, as on the CPU backend, the example runs the same calls without a graph.
#include "example.h"

enum { kHidden = 64, kTopK = 2, kTokens = 16, kExpertsPerRank = 2, kSteps = 5 };

typedef struct {
    const Ranks* ranks;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    ncclNDTensor_t tokens, topk_idx, weights;  // [kTokens, ..]
    ncclNDTensor_t received, results;          // [kExpertsPerRank, slots, kHidden]
    ncclNDTensor_t combined;                   // [kTokens, kHidden]
    size_t received_bytes;
} Layer;

static void create(Layer* layer) {
    const Ranks* ranks = layer->ranks;
    const unsigned slots = (unsigned)ranks->size * kTokens;
    const ncclEpGroupConfig_t config = {
        .version = 1,
        .algorithm = NCCL_EP_ALGO_LOW_LATENCY,
        .num_experts = (unsigned)ranks->size * kExpertsPerRank,
        .max_tokens_per_rank = kTokens,
        .token_size_bytes = kHidden * sizeof(uint16_t),
    };
    TRY_EP(ncclEpCreateGroup(&layer->group, ranks->comm, &config, ranks->stream, NULL, NULL));
    const ncclEpGroup_t group = layer->group;
    const ncclEpTensorTag_t rows = NCCL_EP_TENSOR_TAG_TOKENS;
    layer->tokens = make_tensor(group, rows, ncclBfloat16, 2, kTokens, kHidden, 1);
    layer->combined = make_tensor(group, rows, ncclBfloat16, 2, kTokens, kHidden, 1);
    layer->received = make_tensor(group, rows, ncclBfloat16, 3, kExpertsPerRank, slots, kHidden);
    layer->results = make_tensor(group, rows, ncclBfloat16, 3, kExpertsPerRank, slots, kHidden);
    layer->topk_idx =
        make_tensor(group, NCCL_EP_TENSOR_TAG_TOPK_IDX, ncclInt64, 2, kTokens, kTopK, 1);
    layer->weights =
        make_tensor(group, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, ncclFloat32, 2, kTokens, kTopK, 1);
    layer->received_bytes = sizeof(uint16_t) * kExpertsPerRank * slots * kHidden;
    TRY_EP(ncclEpCreateHandle(&layer->handle, group, &layer->topk_idx, NULL, 0, NULL, ranks->stream,
                              false));
}

// Every tensor and the handle outlive the graph, which has their addresses.
static void destroy(Layer* layer) {
    ncclNDTensor_t* tensors[] = {&layer->tokens,   &layer->topk_idx, &layer->weights,
                                 &layer->received, &layer->results,  &layer->combined};
    TRY_EP(ncclEpHandleDestroy(layer->handle));
    destroy_tensors(layer->group, tensors, sizeof(tensors) / sizeof(tensors[0]));
    TRY_EP(ncclEpGroupDestroy(layer->group, layer->ranks->stream));
}

static float token_value(int rank, unsigned step, unsigned n) {
    return (float)(((unsigned)rank + 3 * step + n) % 64);
}

// A step's data goes where the graph looks for it. Masked ids (negative) make a short batch: the
// shapes in the graph stay, tokens without experts get zeros.
static void route(Layer* layer, unsigned step) {
    static uint16_t tokens[kTokens * kHidden];
    static int64_t topk_idx[kTokens * kTopK];
    static float weights[kTokens * kTopK];
    const unsigned num_experts = (unsigned)layer->ranks->size * kExpertsPerRank;
    for (unsigned n = 0; n < kTokens * kHidden; ++n) {
        tokens[n] = to_bf16(token_value(layer->ranks->rank, step, n));
    }
    for (unsigned n = 0; n < kTokens * kTopK; ++n) {
        const unsigned expert = (n / kTopK * 5 + n % kTopK + step) % num_experts;
        topk_idx[n] = n / kTopK < kTokens - step ? (int64_t)expert : -1;
        weights[n] = n % kTopK == 0 ? 0.25f : 0.75f;
    }
    upload(&layer->tokens, tokens, sizeof(tokens));
    upload(&layer->topk_idx, topk_idx, sizeof(topk_idx));
    upload(&layer->weights, weights, sizeof(weights));
}

static void enqueue(Layer* layer) {
    const cudaStream_t stream = layer->ranks->stream;
    const ncclNDTensor_t* tokens[] = {&layer->tokens};
    ncclNDTensor_t* received[] = {&layer->received};
    TRY_EP(ncclEpDispatch(layer->handle, tokens, 1, received, 1, NULL, 0, 0, NULL, stream));

    TRY_CUDA(cudaMemcpyAsync(layer->results.data, layer->received.data, layer->received_bytes,
                             cudaMemcpyDeviceToDevice, stream));

    const ncclNDTensor_t* results[] = {&layer->results};
    ncclNDTensor_t* combined[] = {&layer->combined};
    ncclNDTensor_t* weights[] = {&layer->weights};
    TRY_EP(ncclEpCombine(layer->handle, results, 1, combined, 1, weights, 1, 0, NULL, stream));
}

// All ranks capture the same operations, and launch their graphs equally often, in one order.
static cudaGraphExec_t capture(Layer* layer) {
    const cudaStream_t stream = layer->ranks->stream;
    // Other threads of the process may go on calling CUDA.
    if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
        cudaGetLastError();
        if (layer->ranks->rank == 0) printf("no graph: this CUDA captures no streams\n");
        return NULL;
    }
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    enqueue(layer);
    TRY_CUDA(cudaStreamEndCapture(stream, &graph));
    TRY_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    TRY_CUDA(cudaGraphDestroy(graph));
    return executable;
}

static int is_right(const Layer* layer, unsigned step) {
    static uint16_t combined[kTokens * kHidden];
    download(combined, &layer->combined, sizeof(combined));
    for (unsigned n = 0; n < kTokens * kHidden; ++n) {
        const int has_experts = n / kHidden < kTokens - step;
        const float expected = has_experts ? token_value(layer->ranks->rank, step, n) : 0;
        if (from_bf16(combined[n]) != expected) return 0;
    }
    return 1;
}

int main(int argc, char** argv) {
    Ranks ranks = example_start(&argc, &argv);
    Layer layer = {.ranks = &ranks};
    create(&layer);
    route(&layer, 0);
    enqueue(&layer);  // once without a graph: code that CUDA loads late may not load in a capture
    TRY_CUDA(cudaStreamSynchronize(ranks.stream));
    const cudaGraphExec_t graph = capture(&layer);
    int right = 1;
    for (unsigned step = 0; step < kSteps; ++step) {
        route(&layer, step);
        if (graph != NULL) {
            TRY_CUDA(cudaGraphLaunch(graph, ranks.stream));
        } else {
            enqueue(&layer);
        }
        TRY_CUDA(cudaStreamSynchronize(ranks.stream));
        right = is_right(&layer, step) && right;
    }
    // The graph before its handle and group.
    if (graph != NULL) TRY_CUDA(cudaGraphExecDestroy(graph));
    destroy(&layer);
    return example_finish(&ranks, right);
}
