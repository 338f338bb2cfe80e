// A trip of test_lifecycle: every token goes to two experts of one rank, so in both modes the round
// trip returns it unchanged.
#include "suites/lifecycle/lifecycle.h"

Place place_of(const EpEnv* env) { return (Place){env->comm, env->stream, NULL, NULL}; }

static bool is_ht(const Trip* trip) { return trip->algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT; }

// Copies and fills run on the default stream, for which unordered streams do not wait.
static void wait_for_default_stream(void) { EP_REQUIRE_CUDA(cudaStreamSynchronize(NULL)); }

static void fill_inputs(Trip* trip) {
    int64_t ids[kTokens][kTopK];
    float weights[kTokens][kTopK];
    uint16_t tokens[kTokens][kHidden];
    for (int t = 0; t < kTokens; ++t) {
        for (int k = 0; k < kTopK; ++k) {
            ids[t][k] = (int64_t)((trip->rank + t) % trip->size) * kLocalExperts + k;
            weights[t][k] = 1.0F / kTopK;
        }
        for (int c = 0; c < kHidden; ++c) {
            tokens[t][c] = ep_bf16_from_f32((float)(trip->rank + t) + 0.25F * (float)c);
        }
    }
    ep_tensor_upload(&trip->ids, ids);
    ep_tensor_upload(&trip->weights, weights);
    ep_tensor_upload(&trip->tokens, tokens);
    wait_for_default_stream();
}

static void open_tensors(Trip* trip) {
    const ncclEpGroup_t group = trip->group;
    const unsigned rows = (unsigned)trip->size * kTokens;
    trip->ids = ep_tensor_2d(group, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens, kTopK);
    trip->weights = ep_tensor_2d(group, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, kTokens, kTopK);
    trip->tokens = ep_tensor_2d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kTokens, kHidden);
    trip->combined = ep_tensor_2d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kTokens, kHidden);
    if (is_ht(trip)) {
        trip->received = ep_tensor_2d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, rows, kHidden);
        trip->received_ids = ep_tensor_2d(group, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, rows, kTopK);
        trip->received_weights = ep_tensor_2d(group, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, rows, kTopK);
    } else {
        trip->received = ep_tensor_3d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kLocalExperts, rows, kHidden);
    }
}

Trip open_trip(ncclEpAlgorithm_t algorithm, Place place) {
    Trip trip = {.algorithm = algorithm, .stream = place.stream};
    EP_REQUIRE_NCCL(ncclCommUserRank(place.comm, &trip.rank));
    EP_REQUIRE_NCCL(ncclCommCount(place.comm, &trip.size));
    const ncclEpGroupConfig_t config =
        ep_group_config(algorithm, (unsigned)trip.size * kLocalExperts, kTokens, kHidden * (unsigned)sizeof(uint16_t));
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&trip.group, place.comm, &config, place.stream, place.alloc_fn, place.free_fn));
    open_tensors(&trip);
    fill_inputs(&trip);
    EP_REQUIRE_NCCL(ncclEpCreateHandle(&trip.handle, trip.group, &trip.ids, NULL, 0, NULL, trip.stream, false));
    return trip;
}

ncclResult_t start_dispatch(Trip* trip) {
    const ncclNDTensor_t* inputs[] = {&trip->tokens, &trip->ids, &trip->weights};
    ncclNDTensor_t* outputs[] = {&trip->received, &trip->received_ids, &trip->received_weights};
    const unsigned tensors = is_ht(trip) ? 3 : 1;
    return ncclEpDispatch(trip->handle, inputs, tensors, outputs, tensors, NULL, 0, 0, NULL, trip->stream);
}

ncclResult_t start_combine(Trip* trip) {
    const ncclNDTensor_t* inputs[] = {&trip->received};
    ncclNDTensor_t* outputs[] = {&trip->combined};
    ncclNDTensor_t* locals[] = {&trip->weights};
    return ncclEpCombine(trip->handle, inputs, 1, outputs, 1, locals, is_ht(trip) ? 0 : 1, 0, NULL, trip->stream);
}

bool came_back(const Trip* trip) {
    uint16_t sent[kTokens][kHidden];
    uint16_t back[kTokens][kHidden];
    if (cudaStreamSynchronize(trip->stream) != cudaSuccess) return false;
    ep_tensor_download(&trip->tokens, sent);
    ep_tensor_download(&trip->combined, back);
    return memcmp(sent, back, sizeof(sent)) == 0;
}

bool make_trip(Trip* trip) {
    ep_tensor_fill(&trip->combined, 0x5a);
    wait_for_default_stream();
    return start_dispatch(trip) == ncclSuccess && start_combine(trip) == ncclSuccess && came_back(trip);
}

bool destroy_tensors(Trip* trip, ncclEpGroup_t group) {
    bool good = true;
    for (size_t i = 0; i < kNumTensors; ++i) {
        good = ncclEpTensorDestroy(group, &trip->all[i]) == ncclSuccess && good;
    }
    return good;
}

bool close_trip(Trip* trip) {
    const bool handle = ncclEpHandleDestroy(trip->handle) == ncclSuccess;
    const bool tensors = destroy_tensors(trip, trip->group);
    return ncclEpGroupDestroy(trip->group, trip->stream) == ncclSuccess && handle && tensors;
}

void finish_trip(Trip* trip) {
    EP_CHECK(make_trip(trip));
    EP_CHECK(close_trip(trip));
}
