// Refusals of rank-major low-latency operations: what differs from expert-major ones.
#include "harness/graphs.h"
#include "harness/nodes.h"
#include "suites/errors/errors.h"

static const BrokenCall kDispatchCalls[] = {
    {"dispatch-rank-out-required"}, {"dispatch-rank-out-ndim"}, {"dispatch-rank-out-ranks", "got 99, expected *"},
    {"dispatch-rank-out-slots"}, {"dispatch-rank-ids-ndim"}, {"dispatch-rank-ids-ranks", "got 99, expected *"},
    {"dispatch-rank-ids-slots"}, {"dispatch-rank-ids-columns"}, {"dispatch-rank-ids-datatype"},
    {"dispatch-rank-ids-data"}, {"dispatch-rank-ids-align"}, {"dispatch-rank-in-weights-required"},
    {"dispatch-rank-in-weights-ndim"}, {"dispatch-rank-in-weights-datatype"}, {"dispatch-rank-in-weights-rows"},
    {"dispatch-rank-in-weights-columns"}, {"dispatch-rank-in-weights-data"}, {"dispatch-rank-in-weights-align"},
    {"dispatch-rank-weights-required"}, {"dispatch-rank-weights-ndim"},
    {"dispatch-rank-weights-ranks", "got 99, expected *"}, {"dispatch-rank-weights-slots"},
    {"dispatch-rank-weights-columns"}, {"dispatch-rank-weights-datatype"}, {"dispatch-rank-weights-data"},
    {"dispatch-rank-weights-align"}, {"dispatch-rank-counter-size", "got 99, expected *"},
};

static const BrokenCall kForwardCalls[] = {
    {"dispatch-rank-out-scales-ranks", "got 99, expected *"}, {"dispatch-rank-out-scales-slots"},
};

static const BrokenCall kCombineCalls[] = {
    {"combine-rank-in-ndim"}, {"combine-rank-in-ranks", "got 99, expected *"}, {"combine-rank-in-slots"},
    {"combine-rank-weights"}, {"combine-rank-in-weights"},
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
    static const OtherCall kCall = {NCCL_EP_ALGO_LOW_LATENCY, kDispatch,       kRankMajor,   NULL,
                                    "running-ll-layout",      "*expert-major", "*rank-major"};
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
    EP_REFUSED("dispatch-view-captured", try_into_view(&view));
    EP_REQUIRE_CUDA(cudaGraphDestroy(ep_end_capture(env->stream)));
    dispatch_into_view(&view);
    EpCaptured captured = ep_capture(env->stream, dispatch_into_view, &view);
    ep_sync(env);
    ep_barrier();
    if (is_odd(env)) dispatch_into_view(&view);
    else ep_replay(&captured);
    check_all_notice(&view.session, kRankMajor, "running-ll-view-place",
                     is_odd(env) ? "got 0, expected 1" : "got 1, expected 0");
    ep_release_captured(&captured);
    ep_device_free(view.ids);
    ep_device_free(view.weights);
}
