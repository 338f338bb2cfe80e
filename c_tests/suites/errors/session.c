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
}

Session open_session(const EpEnv* env, ncclEpAlgorithm_t algorithm) {
    Session session = {.env = env, .algorithm = algorithm};
    fill_inputs(&session);
    const size_t rows = (size_t)max_recv_rows(&session);
    const size_t slabs = algorithm == NCCL_EP_ALGO_LOW_LATENCY ? kLocalExperts : 1;
    session.scales = ep_device_alloc(kTokens * kScales * sizeof(float));
    EP_REQUIRE_CUDA(cudaMemset(session.scales, 0, kTokens * kScales * sizeof(float)));
    session.received_scales = ep_device_alloc(slabs * rows * kScales * sizeof(float));
    session.received = ep_device_alloc(slabs * rows * kHidden * sizeof(uint16_t));
    session.received_ids = ep_device_alloc(rows * kTopK * sizeof(int64_t));
    session.received_weights = ep_device_alloc(rows * kTopK * sizeof(float));
    session.counter = ep_device_alloc((kLocalExperts + (size_t)env->size) * sizeof(int32_t));
    session.combined = ep_device_alloc(kTokens * kHidden * sizeof(uint16_t));
    session.gradients = ep_device_alloc(kTokens * kTopK * sizeof(float));
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
    void* buffers[] = {session->ids,          session->tokens,           session->weights,        session->received,
                       session->received_ids, session->received_weights, session->counter,        session->combined,
                       session->gradients,    session->scales,           session->received_scales};
    for (size_t i = 0; i < COUNT(buffers); ++i) ep_device_free(buffers[i]);
}

void finish_session(Session* session) {
    check_works(session);
    close_session(session);
}

// ---- The tensors of a call ---------------------------------------------------------------------

static EpView* next(TensorList* list) {
    EpView* view = &list->views[list->count];
    list->items[list->count++] = &view->tensor;
    return view;
}

static void add_tokens(TensorList* list, void* data, unsigned rows) {
    ep_view_2d(next(list), data, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, rows, kHidden);
}

static void add_ids(TensorList* list, void* data, unsigned rows) {
    ep_view_2d(next(list), data, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, rows, kTopK);
}

static void add_weights(TensorList* list, void* data, unsigned rows) {
    ep_view_2d(next(list), data, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, rows, kTopK);
}

static void add_counter(TensorList* list, void* data, unsigned counts) {
    ep_view_1d(next(list), data, ncclInt32, NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, counts);
}

static void add_received(const Session* session, TensorList* list) {
    const unsigned rows = max_recv_rows(session);
    if (session->algorithm == NCCL_EP_ALGO_LOW_LATENCY) {
        ep_view_3d(next(list), session->received, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kLocalExperts, rows,
                   kHidden);
    } else {
        add_tokens(list, session->received, rows);
    }
}

static void add_scales(TensorList* list, void* data, unsigned rows, unsigned count) {
    ep_view_2d(next(list), data, ncclFloat32, NCCL_EP_TENSOR_TAG_SCALES, rows, count);
}

static void add_received_scales(const Session* session, TensorList* list, unsigned count) {
    const unsigned rows = max_recv_rows(session);
    if (session->algorithm == NCCL_EP_ALGO_LOW_LATENCY) {
        ep_view_3d(next(list), session->received_scales, ncclFloat32, NCCL_EP_TENSOR_TAG_SCALES, kLocalExperts, rows,
                   count);
    } else {
        add_scales(list, session->received_scales, rows, count);
    }
}

// Rows of the same bytes as uint8 with scales, or cast to uint8 with the scale that they get.
static void add_all_scales(const Session* session, CallKind kind, CallTensors* tensors) {
    TensorList* in = &tensors->lists[kInputs];
    TensorList* out = &tensors->lists[kOutputs];
    EpView* received = &out->views[0];
    received->tensor.datatype = ncclUint8;
    if (kind == kForward) {
        in->views[0].tensor.datatype = ncclUint8;
        in->views[0].sizes[1] = kBytesOfRow;
        received->sizes[received->tensor.ndim - 1] = kBytesOfRow;
        add_scales(in, session->scales, kTokens, kScales);
    }
    add_received_scales(session, out, kind == kForward ? kScales : 1);
}

static void add_planes(const Session* session, TensorList* list, void* data, ncclDataType_t datatype,
                       ncclEpTensorTag_t tag, unsigned columns) {
    ep_view_3d(next(list), data, datatype, tag, (unsigned)session->env->size, kMaxTokens, columns);
}

static void rank_major_tensors(const Session* session, CallKind kind, CallTensors* tensors) {
    TensorList* in = &tensors->lists[kInputs];
    TensorList* out = &tensors->lists[kOutputs];
    const bool scaled = kind == kRankMajorForward;
    const ncclDataType_t type = scaled ? ncclUint8 : ncclBfloat16;
    const unsigned hidden = scaled ? kBytesOfRow : kHidden;
    if (kind == kSummed) {
        add_planes(session, in, session->received, type, NCCL_EP_TENSOR_TAG_TOKENS, hidden);
        add_tokens(out, session->combined, kTokens);
        return;
    }
    ep_view_2d(next(in), session->tokens, type, NCCL_EP_TENSOR_TAG_TOKENS, kTokens, hidden);
    add_weights(in, session->weights, kTokens);
    add_planes(session, out, session->received, type, NCCL_EP_TENSOR_TAG_TOKENS, hidden);
    add_planes(session, out, session->received_ids, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTopK);
    add_planes(session, out, session->received_weights, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, kTopK);
    if (scaled) {
        add_scales(in, session->scales, kTokens, kScales);
        add_planes(session, out, session->received_scales, ncclFloat32, NCCL_EP_TENSOR_TAG_SCALES, kScales);
    }
    add_counter(&tensors->lists[kLocals], session->counter, (unsigned)session->env->size);
}

static bool is_rank_major(CallKind kind) { return kind == kRankMajor || kind == kRankMajorForward || kind == kSummed; }

static bool is_dispatch(CallKind kind) {
    return kind == kDispatch || kind == kTokensOnly || kind == kForward || kind == kCast || kind == kRankMajor ||
           kind == kRankMajorForward;
}

void valid_tensors(const Session* session, CallKind kind, CallTensors* tensors) {
    memset(tensors, 0, sizeof(*tensors));
    if (is_rank_major(kind)) {
        rank_major_tensors(session, kind, tensors);
        return;
    }
    TensorList* in = &tensors->lists[kInputs];
    TensorList* out = &tensors->lists[kOutputs];
    TensorList* local = &tensors->lists[kLocals];
    const bool ht = session->algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT;
    const unsigned rows = max_recv_rows(session);
    if (kind == kCreateHandle) {
        add_ids(in, session->ids, kTokens);
        if (ht) add_counter(local, session->counter, kLocalExperts);
    } else if (is_dispatch(kind)) {
        add_tokens(in, session->tokens, kTokens);
        add_received(session, out);
        add_counter(local, session->counter, kLocalExperts);
        if (ht && kind == kDispatch) {
            add_ids(in, session->ids, kTokens);
            add_weights(in, session->weights, kTokens);
            add_ids(out, session->received_ids, rows);
            add_weights(out, session->received_weights, rows);
        }
        if (kind == kForward || kind == kCast) add_all_scales(session, kind, tensors);
    } else {
        add_received(session, in);
        add_tokens(out, session->combined, kTokens);
        if (!ht) add_weights(local, session->weights, kTokens);
        if (kind == kBackward) {
            add_weights(in, session->received_weights, rows);
            add_weights(out, session->gradients, kTokens);
        }
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
    uint16_t sent[kTokens][kHidden];
    uint16_t back[kTokens][kHidden];
    ep_download(sent, session->tokens, sizeof(sent));
    ep_download(back, session->combined, sizeof(back));
    const bool works = EP_CHECK_EQ_I64(wait_for_failure(session, 0.0), ncclSuccess);
    if (!works) fprintf(stderr, "rank %d: %s\n", session->env->rank, ep_last_error());
    EP_CHECK_EQ_BYTES(back, sent, sizeof(sent));
}
