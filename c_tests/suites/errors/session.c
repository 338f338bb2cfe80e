// The session of test_errors: a small group with all buffers. Every token goes to two experts of
// one rank, so in both modes a round trip returns the tokens unchanged.
#define _GNU_SOURCE  // setenv
#include "suites/errors/errors.h"

static int g_skipped;

bool enough_ranks(const EpEnv* env, int ranks, const char* ids) {
    if (env->size >= ranks) return true;
    if (env->rank == 0) printf("  skipped, needs %d ranks: %s\n", ranks, ids);
    ++g_skipped;
    return false;
}

EP_TEST_LAST(print_skipped) {
    if (env->rank == 0) printf("  %d skipped\n", g_skipped);
}

void set_timeout_ms(unsigned milliseconds) {
    char text[16];
    snprintf(text, sizeof(text), "%u", milliseconds);
    const int failed = milliseconds == 0 ? unsetenv("NCCL_EP_TIMEOUT_MS") : setenv("NCCL_EP_TIMEOUT_MS", text, 1);
    EP_REQUIRE(failed == 0);
}

int odd_rank(const EpEnv* env) { return env->size - 1; }

bool is_odd(const EpEnv* env) { return env->rank == odd_rank(env); }

EpEnv open_own(const EpEnv* env) {
    EpEnv own = *env;
    EP_REQUIRE_NCCL(ncclCommSplit(env->comm, 0, env->rank, &own.comm, NULL));
    EP_REQUIRE_CUDA(cudaStreamCreateWithFlags(&own.stream, cudaStreamNonBlocking));
    return own;
}

// The aborted exchange may have left its error on the stream.
void close_own(const EpEnv* own) {
    (void)cudaStreamSynchronize(own->stream);
    (void)cudaStreamDestroy(own->stream);
    (void)cudaGetLastError();
}

// ---- Opening and closing -----------------------------------------------------------------------

unsigned max_recv_rows(const Session* session) { return (unsigned)session->env->size * kMaxTokens; }

size_t bytes_of_output(const Session* session, unsigned index) {
    const size_t rows = max_recv_rows(session), ranks = (size_t)session->env->size;
    const size_t slots = (session->algorithm == NCCL_EP_ALGO_LOW_LATENCY ? kLocalExperts : 1) * rows;
    const size_t bytes[kNumOutputs] = {slots * kBytesOfRow,
                                       rows * kTopK * sizeof(int64_t),
                                       rows * kTopK * sizeof(float),
                                       slots * kScales * sizeof(float),
                                       (kLocalExperts + ranks) * sizeof(int32_t),
                                       kTokens * kBytesOfRow,
                                       kTokens * kTopK * sizeof(float)};
    return bytes[index];
}

ncclEpGroupConfig_t session_config(const Session* session) {
    return ep_group_config(session->algorithm, (unsigned)session->env->size * kLocalExperts, kMaxTokens, kTokenBytes);
}

ncclResult_t open_group(Session* session) {
    const ncclEpGroupConfig_t config = session_config(session);
    const EpEnv* env = session->env;
    return ncclEpCreateGroup(&session->group, env->comm, &config, env->stream, NULL, NULL);
}

ncclResult_t open_auto_group(Session* session) {
    ncclEpGroupConfig_t config = session_config(session);
    config.max_tokens_per_rank = NCCL_EP_AUTO;
    const EpEnv* env = session->env;
    return ncclEpCreateGroup(&session->group, env->comm, &config, env->stream, NULL, NULL);
}

ncclResult_t open_handle(Session* session) {
    return ep_handle_create(&session->handle, session->group, session->ids, kTokens, kTopK, session->env->stream);
}

static void fill_inputs(Session* session) {
    int64_t ids[kTokens][kTopK];
    float weights[kTokens][kTopK];
    uint16_t tokens[kTokens][kHidden];
    const float scales[kTokens][kScales] = {{0}};
    const int ranks = session->env->size;
    const int rank = session->env->rank;
    for (int t = 0; t < kTokens; ++t) {
        for (int k = 0; k < kTopK; ++k) {
            ids[t][k] = (int64_t)((rank + t) % ranks) * kLocalExperts + k;
            weights[t][k] = 1.0F / kTopK;
        }
        for (int c = 0; c < kHidden; ++c) tokens[t][c] = ep_bf16_from_f32((float)(rank + t) + 0.25F * (float)c);
    }
    session->ids = ep_device_upload(ids, sizeof(ids));
    session->weights = ep_device_upload(weights, sizeof(weights));
    session->tokens = ep_device_upload(tokens, sizeof(tokens));
    session->scales = ep_device_upload(scales, sizeof(scales));
}

Session open_session(const EpEnv* env, ncclEpAlgorithm_t algorithm) {
    Session session = {.env = env, .algorithm = algorithm};
    fill_inputs(&session);
    for (unsigned i = 0; i < kNumOutputs; ++i) session.outputs[i] = ep_device_alloc(bytes_of_output(&session, i));
    EP_REQUIRE_NCCL(open_group(&session));
    EP_REQUIRE_NCCL(open_handle(&session));
    return session;
}

Session open_ll_session(const EpEnv* env) { return open_session(env, NCCL_EP_ALGO_LOW_LATENCY); }
Session open_ht_session(const EpEnv* env) { return open_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT); }

Session open_timed_session(const EpEnv* env, ncclEpAlgorithm_t algorithm, unsigned timeout_ms) {
    set_timeout_ms(timeout_ms);
    const Session session = open_session(env, algorithm);
    set_timeout_ms(0);
    return session;
}

void close_session(Session* session) {
    EP_CHECK_NCCL(ncclEpHandleDestroy(session->handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(session->group, session->env->stream));
    void* inputs[] = {session->ids, session->tokens, session->weights, session->scales};
    for (size_t i = 0; i < COUNT(inputs); ++i) ep_device_free(inputs[i]);
    for (unsigned i = 0; i < kNumOutputs; ++i) ep_device_free(session->outputs[i]);
}

void finish_session(Session* session) {
    check_works(session);
    close_session(session);
}

// ---- The tensors of a call ---------------------------------------------------------------------

// Where a tensor's rows lie: those of this rank's tokens, those that come, and those that come rank by rank.
typedef enum { kHome, kAway, kPlanes } Place;

static void add(const Session* session, TensorList* list, ncclEpTensorTag_t tag, Place place, void* data,
                ncclDataType_t datatype, unsigned columns) {
    EpView* view = &list->views[list->count];
    const unsigned rows = max_recv_rows(session), ranks = (unsigned)session->env->size;
    const bool by_expert = place == kAway && session->algorithm == NCCL_EP_ALGO_LOW_LATENCY;
    if (place == kPlanes) {
        ep_view_3d(view, data, datatype, tag, ranks, kMaxTokens, columns);
    } else if (by_expert) {
        ep_view_3d(view, data, datatype, tag, kLocalExperts, rows, columns);
    } else {
        ep_view_2d(view, data, datatype, tag, place == kHome ? kTokens : rows, columns);
    }
    list->items[list->count++] = &view->tensor;
}

static void add_ids(const Session* session, TensorList* list, Place place, void* data) {
    add(session, list, NCCL_EP_TENSOR_TAG_TOPK_IDX, place, data, ncclInt64, kTopK);
}

static void add_weights(const Session* session, TensorList* list, Place place, void* data) {
    add(session, list, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, place, data, ncclFloat32, kTopK);
}

static void add_tokens(const Session* session, TensorList* list, Place place, void* data, ncclDataType_t datatype) {
    const unsigned bytes = (unsigned)ep_datatype_size(datatype);
    add(session, list, NCCL_EP_TENSOR_TAG_TOKENS, place, data, datatype, kBytesOfRow / bytes);
}

static void add_scales(const Session* session, TensorList* list, Place place, void* data, unsigned count) {
    add(session, list, NCCL_EP_TENSOR_TAG_SCALES, place, data, ncclFloat32, count);
}

static void add_counter(const Session* session, TensorList* list, unsigned counts) {
    EpView* view = &list->views[list->count];
    ep_view_1d(view, session->counter, ncclInt32, NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, counts);
    list->items[list->count++] = &view->tensor;
}

static bool is_rank_major(CallKind kind) { return kind == kRankMajor || kind == kRankMajorForward || kind == kSummed; }

static bool is_dispatch(CallKind kind) {
    return kind == kDispatch || kind == kTokensOnly || kind == kForward || kind == kCast || kind == kRankMajor ||
           kind == kRankMajorForward;
}

// Scales come last: those of rows of the same bytes as uint8, or of a cast the one that each row gets.
static void add_dispatched(const Session* session, CallKind kind, CallTensors* tensors) {
    TensorList *in = &tensors->lists[kInputs], *out = &tensors->lists[kOutputs];
    const bool by_rank = is_rank_major(kind), scaled = kind == kForward || kind == kRankMajorForward;
    const bool routed = session->algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT && kind == kDispatch;
    const Place away = by_rank ? kPlanes : kAway;
    add_tokens(session, in, kHome, session->tokens, scaled ? ncclUint8 : ncclBfloat16);
    add_tokens(session, out, away, session->received, scaled ? ncclUint8 : ncclBfloat16);
    if (kind == kCast) out->views[0].tensor.datatype = ncclUint8;
    if (routed) add_ids(session, in, kHome, session->ids);
    if (routed || by_rank) {
        add_weights(session, in, kHome, session->weights);
        add_ids(session, out, away, session->received_ids);
        add_weights(session, out, away, session->received_weights);
    }
    if (scaled) add_scales(session, in, kHome, session->scales, kScales);
    if (scaled || kind == kCast) add_scales(session, out, away, session->received_scales, scaled ? kScales : 1);
    add_counter(session, &tensors->lists[kLocals], by_rank ? (unsigned)session->env->size : kLocalExperts);
}

static void add_combined(const Session* session, CallKind kind, CallTensors* tensors) {
    TensorList *in = &tensors->lists[kInputs], *out = &tensors->lists[kOutputs];
    const bool weighted = session->algorithm == NCCL_EP_ALGO_LOW_LATENCY && kind == kCombine;
    add_tokens(session, in, is_rank_major(kind) ? kPlanes : kAway, session->received, ncclBfloat16);
    add_tokens(session, out, kHome, session->combined, ncclBfloat16);
    if (weighted) add_weights(session, &tensors->lists[kLocals], kHome, session->weights);
    if (kind != kBackward) return;
    add_weights(session, in, kAway, session->received_weights);
    add_weights(session, out, kHome, session->gradients);
}

void valid_tensors(const Session* session, CallKind kind, CallTensors* tensors) {
    memset(tensors, 0, sizeof(*tensors));
    if (kind == kCreateHandle) {
        const bool counts = session->algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT;
        add_ids(session, &tensors->lists[kInputs], kHome, session->ids);
        if (counts) add_counter(session, &tensors->lists[kLocals], kLocalExperts);
    } else {
        (is_dispatch(kind) ? add_dispatched : add_combined)(session, kind, tensors);
    }
}

ncclResult_t make_call(const Session* session, CallKind kind, CallTensors* tensors, unsigned send_only) {
    ncclNDTensor_t* const* arrays[kNumLists];
    for (int i = 0; i < kNumLists; ++i) arrays[i] = tensors->lists[i].null ? NULL : tensors->lists[i].items;
    const ncclNDTensor_t* inputs[kMaxTensors];
    for (int i = 0; i < kMaxTensors; ++i) inputs[i] = tensors->lists[kInputs].items[i];
    const ncclNDTensor_t* const* in = tensors->lists[kInputs].null ? NULL : inputs;
    const unsigned num_in = tensors->lists[kInputs].count;
    const unsigned num_out = tensors->lists[kOutputs].count;
    const unsigned num_local = tensors->lists[kLocals].count;
    cudaStream_t stream = session->env->stream;
    if (kind == kCreateHandle) {
        ncclEpHandle_t handle = NULL;
        const ncclResult_t result =
            ncclEpCreateHandle(&handle, session->group, inputs[0], arrays[kLocals], num_local, NULL, stream, false);
        EP_CHECK((handle == NULL) == (result != ncclSuccess));
        if (handle != NULL) EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
        return result;
    }
    if (is_dispatch(kind)) {
        const ncclEpDispatchConfig_t config = {tensors->round_scales};
        return ncclEpDispatch(session->handle, in, num_in, arrays[kOutputs], num_out, arrays[kLocals], num_local,
                              send_only, tensors->round_scales != 0 ? &config : NULL, stream);
    }
    return ncclEpCombine(session->handle, in, num_in, arrays[kOutputs], num_out, arrays[kLocals], num_local, send_only,
                         NULL, stream);
}

void take_a_row(CallTensors* tensors, ListName list, unsigned tag) {
    for (unsigned i = 0; i < tensors->lists[list].count; ++i) {
        EpView* view = &tensors->lists[list].views[i];
        const bool pair = tag == NCCL_EP_TENSOR_TAG_TOPK_IDX && view->tensor.tag == NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS;
        if (view->tensor.tag == tag || pair) view->sizes[0] = kTokens - 1;
    }
}

ncclResult_t make_valid_call(const Session* session, CallKind kind, unsigned send_only) {
    CallTensors tensors;
    valid_tensors(session, kind, &tensors);
    return make_call(session, kind, &tensors, send_only);
}

void check_works(const Session* session) {
    CallTensors tensors;
    valid_tensors(session, kDispatch, &tensors);
    EP_CHECK_NCCL(make_call(session, kDispatch, &tensors, 0));
    valid_tensors(session, kCombine, &tensors);
    EP_CHECK_NCCL(make_call(session, kCombine, &tensors, 0));
    ep_sync(session->env);
    check_combined(session);
}

void check_combined(const Session* session) {
    uint16_t sent[kTokens][kHidden];
    uint16_t back[kTokens][kHidden];
    ep_download(sent, session->tokens, sizeof(sent));
    ep_download(back, session->combined, sizeof(back));
    const bool works = EP_CHECK_EQ_I64(wait_for_failure(session, 0.0), ncclSuccess);
    if (!works) fprintf(stderr, "rank %d: %s\n", session->env->rank, ep_last_error());
    EP_CHECK_EQ_BYTES(back, sent, sizeof(sent));
}
