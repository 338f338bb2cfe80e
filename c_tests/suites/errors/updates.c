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
    EP_INVALID("handle-open-room", open_handle_of(session, 4, &handle),
               "ncclEpHandleOpen: expert_alignment: must be 0 but in high throughput with few enough "
               "max_tokens_per_rank (got 4, expected 0)");
    EP_CHECK(handle == NULL);
}

LL_SESSION_TEST(ll_updates) {
    check_without_room(session);
    CallTensors tensors;
    valid_tensors(session, kDispatch, &tensors);
    EP_CHECK_NCCL(make_call(session, kDispatch, &tensors, 1));
    EP_MISUSED("handle-update-staged", update(session, session->handle, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens),
               "ncclEpHandleUpdate: handle: its staged operation waits for ncclEpComplete");
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
    EP_INVALID("handle-open-alignment", open_handle_of(session, 3, &handle),
               "ncclEpHandleOpen: expert_alignment: must be 0 or a power of two (got 3, expected a power of two)");
    // A power of two at the bound.
    EP_INVALID("handle-open-countable", open_handle_of(session, 1u << 30, &handle),
               "ncclEpHandleOpen: expert_alignment: rows by expert, filled up to it, must be countable in 31 bits "
               "(got 1073741824, expected %u or less)",
               (INT32_MAX - kLocalExperts * kMaxTokens * (unsigned)session->env->size) / kLocalExperts + 1);
    EP_CHECK_NCCL(open_handle_of(session, 1u << 29, &handle));
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    Session by_expert = *session;
    EP_CHECK_NCCL(open_handle_of(session, 4, &by_expert.handle));
    EP_MISUSED("dispatch-unrouted", make_valid_call(&by_expert, kDispatch, 0),
               "ncclEpDispatch: handle: has no routing yet");
    EP_MISUSED("combine-unrouted", make_valid_call(&by_expert, kCombine, 0),
               "ncclEpCombine: handle: has no routing yet");
    unsigned rows = 77;
    EP_MISUSED("num-recv-unrouted", ncclEpHandleGetNumRecvTokens(by_expert.handle, &rows),
               "ncclEpHandleGetNumRecvTokens: handle: has no routing yet");
    EP_CHECK_EQ_U64(rows, 77);
    EP_INVALID("handle-update-tag", update(session, by_expert.handle, NCCL_EP_TENSOR_TAG_TOKENS, kTokens),
               "ncclEpHandleUpdate: topk_idx.tag: must be NCCL_EP_TENSOR_TAG_TOPK_IDX (got 1, expected 2)");
    EP_INVALID("handle-update-rows", update(session, by_expert.handle, NCCL_EP_TENSOR_TAG_TOPK_IDX, kMaxTokens + 1),
               "ncclEpHandleUpdate: topk_idx.sizes[0]: must be at most the group's max_tokens_per_rank "
               "(got 7, expected 6 or less)");
    if (ep_num_nodes() == 1 && ep_begin_capture(env->stream)) {
        EP_INVALID("handle-update-tag", update(session, by_expert.handle, NCCL_EP_TENSOR_TAG_TOKENS, kTokens),
                   "ncclEpHandleUpdate: topk_idx.tag: must be NCCL_EP_TENSOR_TAG_TOPK_IDX (got 1, expected 2)");
        EP_REQUIRE_CUDA(cudaGraphDestroy(ep_end_capture(env->stream)));
    }
    EP_CHECK_NCCL(update(session, by_expert.handle, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens));
    EP_INVALID("dispatch-by-expert-cast", make_valid_call(&by_expert, kCast, 0),
               "ncclEpDispatch: inputs[SCALES]: is required: rows that lie by expert are not cast");
    ep_sync(session->env);
    EP_CHECK_NCCL(ncclEpHandleDestroy(by_expert.handle));
    EP_CHECK_NCCL(update(session, session->handle, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens));
}
