// Refusals of dispatches with scales, forwarded or made by a cast, in both modes; what is not refused;
// and ranks whose scales differ.
#include "harness/nodes.h"
#include "suites/errors/errors.h"

// ---- Scales that are forwarded -----------------------------------------------------------------

static const BrokenCall kLlForward[] = {
    {"dispatch-ll-out-scales"}, {"dispatch-ll-in-scales"},
    {"dispatch-ll-in-row-scales", NULL, "inputs[TOKENS].sizes[1]: (got 64"}, {"dispatch-ll-in-scales-ndim"},
    {"dispatch-ll-in-scales-datatype"}, {"dispatch-ll-in-scales-width"}, {"dispatch-ll-in-scales-rows"},
    {"dispatch-ll-in-scales-strides"},
    {"dispatch-ll-in-scales-data"}, {"dispatch-ll-in-scales-align"}, {"dispatch-ll-out-scales-ndim"},
    {"dispatch-ll-out-scales-datatype"}, {"dispatch-ll-out-scales-type"}, {"dispatch-ll-out-scales-experts"},
    {"dispatch-ll-out-scales-rows", "got 1, expected *"}, {"dispatch-ll-out-scales-columns"},
    {"dispatch-ll-out-scales-strides", "got [2, 1, 1], expected pitches for * rows of 3 scales"},
    {"dispatch-ll-out-scales-data"}, {"dispatch-ll-out-scales-align"},
};

static const BrokenCall kHtForward[] = {
    {"dispatch-ht-out-scales"}, {"dispatch-ht-in-scales"},
    {"dispatch-ht-in-row-scales", NULL, "inputs[TOKENS].sizes[1]: (got 64"}, {"dispatch-ht-in-scales-ndim"},
    {"dispatch-ht-in-scales-datatype"}, {"dispatch-ht-in-scales-width"}, {"dispatch-ht-in-scales-rows"},
    {"dispatch-ht-in-scales-strides"},
    {"dispatch-ht-in-scales-data"}, {"dispatch-ht-in-scales-align"}, {"dispatch-ht-out-scales-ndim"},
    {"dispatch-ht-out-scales-datatype"}, {"dispatch-ht-out-scales-type"},
    {"dispatch-ht-out-scales-rows", "got 1, expected *"}, {"dispatch-ht-out-scales-columns"},
    {"dispatch-ht-out-scales-strides", "got [2, 1], expected pitches for * rows of 3 scales"},
    {"dispatch-ht-out-scales-data"}, {"dispatch-ht-out-scales-align"},
};

// ---- Casts -------------------------------------------------------------------------------------

static const BrokenCall kLlCast[] = {
    {"dispatch-ll-cast-datatype"}, {"dispatch-ll-cast-scales-datatype"},
    {"dispatch-ll-cast-scales-columns", "got 2, expected 1"},
};

static const BrokenCall kHtCast[] = {
    {"dispatch-ht-cast-required"}, {"dispatch-ht-cast-datatype"}, {"dispatch-ht-cast-scales-datatype"},
    {"dispatch-ht-cast-scales-columns", "got 2, expected 1"},
};

static void check_rounding(const Session* session, const char* id) {
    CallTensors tensors;
    valid_tensors(session, kForward, &tensors);
    tensors.round_scales = 1;
    EP_REFUSED(id, make_call(session, kForward, &tensors, 0));
}

// A call with scales, or with rows that nothing sums, passes.
static void check_moved(const Session* session, CallKind kind, bool scaled) {
    CallTensors tensors;
    valid_tensors(session, kind, &tensors);
    if (!scaled) {
        tensors.lists[kInputs].views[0].tensor.datatype = ncclInt64;
        tensors.lists[kInputs].views[0].sizes[1] = kBytesOfRow / 8;
        EpView* out = &tensors.lists[kOutputs].views[0];
        out->tensor.datatype = ncclInt64;
        out->sizes[out->tensor.ndim - 1] = kBytesOfRow / 8;
    }
    EP_CHECK_NCCL(make_call(session, kind, &tensors, 0));
    ep_sync(session->env);
}

LL_SESSION_TEST(ll_scales_arguments) {
    check_broken_calls(session, kForward, kLlForward, COUNT(kLlForward));
    check_broken_calls(session, kCast, kLlCast, COUNT(kLlCast));
    check_rounding(session, "dispatch-ll-round-scales");
    check_moved(session, kDispatch, false);
    check_moved(session, kForward, true);
    check_moved(session, kCast, true);
}

HT_SESSION_TEST(ht_scales_arguments) {
    check_broken_calls(session, kForward, kHtForward, COUNT(kHtForward));
    check_broken_calls(session, kCast, kHtCast, COUNT(kHtCast));
    check_rounding(session, "dispatch-ht-round-scales");
    check_moved(session, kTokensOnly, false);
    check_moved(session, kForward, true);
    check_moved(session, kCast, true);
}

// ---- Ranks whose scales differ -----------------------------------------------------------------

void remove_scales(CallTensors* tensors) {
    --tensors->lists[kInputs].count;
    --tensors->lists[kOutputs].count;
}

// As many of another type of the same width.
static void change_scales(CallTensors* tensors) {
    for (ListName list = kInputs; list <= kOutputs; ++list) {
        tensors->lists[list].views[tensors->lists[list].count - 1].tensor.datatype = ncclInt32;
    }
}

// The odd rank sends long rows, the others short ones, which take half a slot of the receiver's ring: so the word that
// says which scales rows have lies elsewhere.
static void scales_of_long_rows(const EpEnv* env) {
    enum { kLong = 1984, kMost = 2048 };
    Session session = open_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    EP_CHECK_NCCL(ncclEpHandleDestroy(session.handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(session.group, env->stream));
    session.group =
        ep_group_create(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, (unsigned)env->size * kLocalExperts, kMaxTokens, kMost);
    EP_REQUIRE_NCCL(open_handle(&session));
    void* sent = ep_device_alloc((size_t)kTokens * kLong);
    void* received = ep_device_alloc((size_t)max_recv_rows(&session) * kLong);
    EP_REQUIRE_CUDA(cudaMemset(sent, 0, (size_t)kTokens * kLong));
    CallTensors tensors;
    valid_tensors(&session, kForward, &tensors);
    for (ListName list = kInputs; is_odd(env) && list <= kOutputs; ++list) {
        EpView* rows = &tensors.lists[list].views[0];
        rows->sizes[1] = kLong;
        rows->tensor.data = list == kInputs ? sent : received;
    }
    ep_barrier();
    EP_CHECK_NCCL(make_call(&session, kForward, &tensors, 0));
    check_all_notice(&session, kForward, "running-scale-bytes",
                     is_odd(env) ? "got 1984 + 12, expected 32 + 12" : "got 32 + 12, expected 1984 + 12");
    ep_device_free(sent);
    ep_device_free(received);
}

static void scales_that_differ(const EpEnv* env, ncclEpAlgorithm_t algorithm) {
    if (!enough_ranks(env, 2, "running-scale-bytes, running-scale-type")) return;
    // Between GPUs of several nodes messages have another size then, of which NCCL promises nothing: there
    // *_different_calls_over_nodes want some error, here the text is checked.
    const OtherCall calls[] = {{algorithm, kForward, kForward, remove_scales, "running-scale-bytes",
                                "32 + 12", "32 + 0"},
                               {algorithm, kForward, kForward, change_scales, "running-scale-type",
                                "float32", "int32"}};
    if (ep_on_host_backend() || ep_num_nodes() == 1) check_other_call(env, &calls[0]);
    check_other_call(env, &calls[1]);
}

EP_TEST(ll_scales_that_differ) { scales_that_differ(env, NCCL_EP_ALGO_LOW_LATENCY); }

EP_TEST_HT(ht_scales_that_differ) {
    scales_that_differ(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    const bool one_node = ep_on_host_backend() || ep_num_nodes() == 1;
    if (one_node && enough_ranks(env, 2, "running-scale-bytes")) scales_of_long_rows(env);
}
