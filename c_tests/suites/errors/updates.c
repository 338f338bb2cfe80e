// Refusals of handles that are opened first: of their alignment, of updates, and of what has no routing yet.
#include "harness/graphs.h"
#include "harness/nodes.h"
#include "suites/errors/errors.h"

static ncclResult_t open_handle_of(const Session* session, unsigned alignment, ncclEpHandle_t* handle) {
    *handle = NULL;
    return ncclEpHandleOpen(handle, session->group, alignment);
}

static ncclResult_t update(const Session* session, ncclEpHandle_t handle, ncclEpTensorTag_t tag, unsigned tokens) {
    EpView ids;
    ep_view_2d(&ids, session->ids, ncclInt64, tag, tokens, kTopK);
    return ncclEpHandleUpdate(handle, &ids.tensor, NULL, 0, session->env->stream);
}

static void check_without_room(const Session* session) {
    ncclEpHandle_t handle;
    EP_REFUSED("handle-open-room", open_handle_of(session, 4, &handle));
    for (unsigned alignment = 0; alignment <= 4; alignment += 4) {
        EP_REFUSED("handle-open-bounded-room", ncclEpHandleOpenBounded(&handle, session->group, alignment, 8));
    }
    EP_CHECK(handle == NULL);
}

// To `out`, with so many rows and weights.
static ncclResult_t dispatch_by_expert(const Session* session, ncclEpHandle_t handle, void* out, unsigned rows,
                                       unsigned weights) {
    EpView views[4];
    ep_view_2d(&views[0], session->tokens, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kTokens, kHidden);
    ep_view_2d(&views[1], session->weights, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, kTokens, kTopK);
    char* const out_weights = (char*)out + sizeof(uint16_t) * kHidden * rows;
    ep_view_2d(&views[2], out, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, rows, kHidden);
    ep_view_1d(&views[3], out_weights, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, weights);
    const ncclNDTensor_t* inputs[] = {&views[0].tensor, &views[1].tensor};
    ncclNDTensor_t* outputs[] = {&views[2].tensor, &views[3].tensor};
    return ncclEpDispatch(handle, inputs, 2, outputs, 2, NULL, 0, 0, NULL, session->env->stream);
}

static void check_with_a_bound(const Session* session) {
    ncclEpHandle_t handle;
    EP_CHECK_NCCL(ncclEpHandleOpenBounded(&handle, session->group, 0, 2));
    EP_CHECK_NCCL(update(session, handle, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens));
    void* const out = session->received;
    EP_REFUSED_AS("dispatch-ht-out-told", dispatch_by_expert(session, handle, out, 1, 2), "got 1, expected 2 or more");
    EP_REFUSED_AS("dispatch-ht-out-weights-told", dispatch_by_expert(session, handle, out, 2, 1),
                  "got 1, expected 2 or more");
    ep_sync(session->env);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
}

// Of rows that nobody has counted, on the odd rank. The others may hear of it.
EP_TEST_HT(ht_too_few_weights_by_expert) {
    Session session = open_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    ncclEpHandle_t handle;
    EP_CHECK_NCCL(open_handle_of(&session, 1, &handle));
    EP_CHECK_NCCL(update(&session, handle, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens));
    const unsigned most = kTokens * kTopK * (unsigned)env->size;
    void* const out = ep_device_alloc(most * (sizeof(uint16_t) * kHidden + sizeof(float)));
    ep_barrier();
    EP_CHECK_NCCL(dispatch_by_expert(&session, handle, out, most, is_odd(env) ? 1 : most));
    if (is_odd(env)) {
        EP_REFUSED_AS("running-ht-out-weights", wait_for_failure(&session, 10.0), "{ncclEpDispatch (high throughput)}");
    }
    ep_barrier();
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    recover_and_close(&session);
    ep_device_free(out);
}

LL_SESSION_TEST(ll_updates) {
    check_without_room(session);
    CallTensors tensors;
    valid_tensors(session, kDispatch, &tensors);
    EP_CHECK_NCCL(make_call(session, kDispatch, &tensors, 1));
    EP_REFUSED("handle-update-staged", update(session, session->handle, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens));
    EP_CHECK_NCCL(ncclEpComplete(session->handle, NULL, session->env->stream));
    EP_CHECK_NCCL(update(session, session->handle, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens));
}

EP_TEST_HT(rows_without_a_bound_by_expert) {
    Session session = {.env = env, .algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT};
    EP_REQUIRE_NCCL(open_auto_group(&session));
    check_without_room(&session);
    EP_CHECK_NCCL(ncclEpGroupDestroy(session.group, env->stream));
}

HT_SESSION_TEST(ht_updates) {
    ncclEpHandle_t handle;
    EP_REFUSED("handle-open-alignment", open_handle_of(session, 3, &handle));
    // A power of two at the bound.
    EP_REFUSED_AS("handle-open-countable", open_handle_of(session, 1u << 30, &handle),
                  "got 1073741824, expected %u or less",
                  (INT32_MAX - kLocalExperts * kMaxTokens * (unsigned)session->env->size) / kLocalExperts + 1);
    EP_CHECK_NCCL(open_handle_of(session, 1u << 29, &handle));
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    Session by_expert = *session;
    EP_CHECK_NCCL(open_handle_of(session, 4, &by_expert.handle));
    EP_REFUSED("dispatch-unrouted", make_valid_call(&by_expert, kDispatch, 0));
    EP_REFUSED("combine-unrouted", make_valid_call(&by_expert, kCombine, 0));
    unsigned rows = 77;
    EP_REFUSED("num-recv-unrouted", ncclEpHandleGetNumRecvTokens(by_expert.handle, &rows));
    EP_CHECK_EQ_U64(rows, 77);
    EP_REFUSED("handle-update-tag", update(session, by_expert.handle, NCCL_EP_TENSOR_TAG_TOKENS, kTokens));
    EP_REFUSED("handle-update-rows", update(session, by_expert.handle, NCCL_EP_TENSOR_TAG_TOPK_IDX, kMaxTokens + 1));
    if (ep_num_nodes() == 1 && ep_begin_capture(env->stream)) {
        EP_REFUSED("handle-update-tag", update(session, by_expert.handle, NCCL_EP_TENSOR_TAG_TOKENS, kTokens));
        EP_REQUIRE_CUDA(cudaGraphDestroy(ep_end_capture(env->stream)));
    }
    EP_CHECK_NCCL(update(session, by_expert.handle, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens));
    EP_REFUSED("dispatch-by-expert-cast", make_valid_call(&by_expert, kCast, 0));
    ep_sync(session->env);
    EP_CHECK_NCCL(ncclEpHandleDestroy(by_expert.handle));
    check_with_a_bound(session);
    EP_CHECK_NCCL(update(session, session->handle, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens));
}
