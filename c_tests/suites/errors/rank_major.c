// Refusals of rank-major low-latency operations: what differs from expert-major ones.
#include "harness/graphs.h"
#include "harness/nodes.h"
#include "suites/errors/calls.h"

#define RANKS "must be the number of ranks"
#define SLOTS "must be the group's max_tokens_per_rank"

static const BrokenCall kDispatchCalls[] = {
    MISSING("dispatch-rank-out-required", kOutputs, TOKENS),
    NDIM("dispatch-rank-out-ndim", kOutputs, TOKENS, 2, 3),
    SIZE("dispatch-rank-out-ranks", kOutputs, TOKENS, 0, 99, RANKS, "*"),
    SIZE("dispatch-rank-out-slots", kOutputs, TOKENS, 1, 5, SLOTS, "6"),
    NDIM("dispatch-rank-ids-ndim", kOutputs, IDS, 2, 3),
    SIZE("dispatch-rank-ids-ranks", kOutputs, IDS, 0, 99, RANKS, "*"),
    SIZE("dispatch-rank-ids-slots", kOutputs, IDS, 1, 5, SLOTS, "6"),
    SIZE("dispatch-rank-ids-columns", kOutputs, IDS, 2, 3, "must be the handle's top-k", "2"),
    DATATYPE("dispatch-rank-ids-datatype", kOutputs, IDS, ncclInt32, "int32", "int64"),
    DATA("dispatch-rank-ids-data", "dispatch-rank-ids-align", kOutputs, IDS, 8),
    MISSING("dispatch-rank-in-weights-required", kInputs, WEIGHTS),
    NDIM("dispatch-rank-in-weights-ndim", kInputs, WEIGHTS, 1, 2),
    DATATYPE("dispatch-rank-in-weights-datatype", kInputs, WEIGHTS, ncclFloat16, "float16", "float32"),
    SIZE("dispatch-rank-in-weights-rows", kInputs, WEIGHTS, 0, 5, "must be the handle's number of tokens", "4"),
    SIZE("dispatch-rank-in-weights-columns", kInputs, WEIGHTS, 1, 3, "must be the handle's top-k", "2"),
    DATA("dispatch-rank-in-weights-data", "dispatch-rank-in-weights-align", kInputs, WEIGHTS, 4),
    MISSING("dispatch-rank-weights-required", kOutputs, WEIGHTS),
    NDIM("dispatch-rank-weights-ndim", kOutputs, WEIGHTS, 2, 3),
    SIZE("dispatch-rank-weights-ranks", kOutputs, WEIGHTS, 0, 99, RANKS, "*"),
    SIZE("dispatch-rank-weights-slots", kOutputs, WEIGHTS, 1, 5, SLOTS, "6"),
    SIZE("dispatch-rank-weights-columns", kOutputs, WEIGHTS, 2, 3, "must be the handle's top-k", "2"),
    DATATYPE("dispatch-rank-weights-datatype", kOutputs, WEIGHTS, ncclFloat16, "float16", "float32"),
    DATA("dispatch-rank-weights-data", "dispatch-rank-weights-align", kOutputs, WEIGHTS, 4),
    SIZE("dispatch-rank-counter-size", kLocals, COUNTER, 0, 99, RANKS, "*"),
};

static const BrokenCall kForwardCalls[] = {
    SIZE("dispatch-rank-out-scales-ranks", kOutputs, SCALES, 0, 99, RANKS, "*"),
    SIZE("dispatch-rank-out-scales-slots", kOutputs, SCALES, 1, 5, SLOTS, "6"),
};

static const BrokenCall kCombineCalls[] = {
    NDIM("combine-rank-in-ndim", kInputs, TOKENS, 2, 3),
    SIZE("combine-rank-in-ranks", kInputs, TOKENS, 0, 99, RANKS, "*"),
    SIZE("combine-rank-in-slots", kInputs, TOKENS, 1, 5, SLOTS, "6"),
    BROKEN("combine-rank-weights", kLocals, WEIGHTS, kAdd, 0,
           "local_tensors[TOPK_WEIGHTS]: the caller applies the weights before a combine of rank-major rows"),
    BROKEN("combine-rank-in-weights", kInputs, WEIGHTS, kAdd, 0,
           "inputs[TOPK_WEIGHTS]: the caller applies the weights before a combine of rank-major rows"),
};

LL_SESSION_TEST(rank_major_arguments) {
    check_broken_calls(session, kRankMajor, kDispatchCalls, COUNT(kDispatchCalls));
    check_broken_calls(session, kRankMajorForward, kForwardCalls, COUNT(kForwardCalls));
    EP_CHECK_NCCL(make_valid_call(session, kRankMajorForward, 0));
    EP_CHECK_NCCL(make_valid_call(session, kRankMajor, 0));
    check_broken_calls(session, kSummed, kCombineCalls, COUNT(kCombineCalls));
    EP_CHECK_NCCL(make_valid_call(session, kSummed, 0));
}

// One rank's rows are rank-major where those of the others are not.
EP_TEST(rank_major_on_one_rank) {
    // Without the stars the words would be taken for the ids of refusals.
    static const OtherCall kCall = {
        NCCL_EP_ALGO_LOW_LATENCY,   kDispatch,       kRankMajor,   NULL, "running-ll-layout",
        "layout: must be the same", "*expert-major", "*rank-major"};
    if (enough_ranks(env, 2, "running-ll-layout")) check_other_call(env, &kCall);
}

// Room for so many tokens that views are not copied.
enum { kRoom = 129 };

static void reopen_with_room(Session* session) {
    const EpEnv* env = session->env;
    ncclEpGroupConfig_t config = session_config(session);
    config.max_tokens_per_rank = kRoom;
    EP_CHECK_NCCL(ep_handle_destroy(&session->handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(session->group, env->stream));
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&session->group, env->comm, &config, env->stream, NULL, NULL));
    EP_REQUIRE_NCCL(open_handle(session));
}

typedef struct {
    Session session;
    void *ids, *weights;  // [R, kRoom, K]
} ViewSession;

static ncclResult_t try_into_view(const ViewSession* view) {
    CallTensors tensors;
    valid_tensors(&view->session, kRankMajor, &tensors);
    for (unsigned i = 0; i < tensors.lists[kOutputs].count; ++i) {
        EpView* out = &tensors.lists[kOutputs].views[i];
        out->sizes[1] = kRoom;
        const ncclEpTensorTag_t tag = out->tensor.tag;
        out->tensor.data = tag == NCCL_EP_TENSOR_TAG_TOPK_IDX       ? view->ids
                           : tag == NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS ? view->weights
                                                                    : NULL;
    }
    return make_call(&view->session, kRankMajor, &tensors, 0);
}

static void dispatch_into_view(void* context) { EP_CHECK_NCCL(try_into_view(context)); }

// Places of views are taken by turns, also by captures: one rank calls where the others replay.
EP_TEST(rank_major_views_in_other_places) {
    if (!enough_ranks(env, 2, "running-ll-view-place") || ep_on_host_backend() || ep_num_nodes() > 1) return;
    const size_t entries = (size_t)env->size * kRoom * kTopK;
    ViewSession view = {open_ll_session(env), ep_device_alloc(entries * sizeof(int64_t)),
                        ep_device_alloc(entries * sizeof(float))};
    reopen_with_room(&view.session);
    EP_REQUIRE(ep_begin_capture(env->stream));
    EP_MISUSED("dispatch-view-captured", try_into_view(&view),
               "ncclEpDispatch: stream: must not be captured into a graph by the group's first dispatch into a view, "
               "which makes their memory");
    EP_REQUIRE_CUDA(cudaGraphDestroy(ep_end_capture(env->stream)));
    dispatch_into_view(&view);
    EpCaptured captured = ep_capture(env->stream, dispatch_into_view, &view);
    ep_sync(env);
    ep_barrier();
    if (is_odd(env)) dispatch_into_view(&view);
    else ep_replay(&captured);
    check_all_notice(&view.session, kRankMajor, "running-ll-view-place", "place of the view: must be the same",
                     is_odd(env) ? " (got 0, expected 1)" : " (got 1, expected 0)");
    ep_release_captured(&captured);
    ep_device_free(view.ids);
    ep_device_free(view.weights);
}
