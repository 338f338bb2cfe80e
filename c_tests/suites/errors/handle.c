// Refusals of ncclEpCreateHandle. In low latency each rank decides alone. In high throughput the
// call is collective, so the others learn of a rank that refuses (disagreement.c).
#include "suites/errors/errors.h"

static const BrokenCall kIdsCalls[] = {
    {"handle-topk-null"}, {"handle-topk-dims"}, {"handle-topk-dims", "got 6, expected 1 to 5"}, {"handle-topk-sizes"},
    {"handle-topk-strides"}, {"handle-topk-tag"}, {"handle-topk-ndim"}, {"handle-topk-datatype"},
    {"handle-topk-datatype", "got an unknown number, expected int64"}, {"handle-topk-columns"}, {"handle-topk-rows"},
    {"handle-topk-data"}, {"handle-topk-align"},
};

static const BrokenCall kLlCalls[] = {
    {"handle-ll-topk-columns"}, {"handle-ll-counter", "{DEVICE}"}, {"handle-ll-counter", "{HOST}"},
};

static const BrokenCall kHtLocalCalls[] = {
    {"handle-locals-null"}, {"handle-locals-item", "{0}"}, {"handle-locals-count", "got 17, expected at most 16"},
    {"handle-locals-again", "{1}{DEVICE}"}, {"handle-locals-dims", "{DEVICE}"}, {"handle-locals-sizes", "{DEVICE}"},
    {"handle-locals-strides", "{DEVICE}"}, {"handle-ht-counter-ndim", "{DEVICE}"},
    {"handle-ht-counter-datatype", "{DEVICE}"}, {"handle-ht-counter-size", "{DEVICE}"},
    {"handle-ht-counter-data", "{DEVICE}"}, {"handle-ht-counter-align", "{DEVICE}"},
    {"handle-ht-counter-host", "got *, expected an address that the device can reach",
     "local_tensors[RECV_EXPERT_COUNTER_DEVICE].tag: (got RECV_EXPERT_COUNTER_HOST"},
};

// The result pointer and the configuration: not tensors, and the same in both modes.
static void other_arguments(const Session* session) {
    EpView ids;
    ep_view_2d(&ids, session->ids, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens, kTopK);
    cudaStream_t stream = session->env->stream;
    EP_REFUSED("handle-out-null", ncclEpCreateHandle(NULL, session->group, &ids.tensor, NULL, 0, NULL, stream, false));
    ncclEpHandle_t handle = NULL;
    const ncclEpHandleConfig_t config = NULL;
    EP_REFUSED("handle-config",
               ncclEpCreateHandle(&handle, session->group, &ids.tensor, NULL, 0, &config, stream, false));
    EP_CHECK(handle == NULL);
}

LL_SESSION_TEST(ll_handle_arguments) {
    other_arguments(session);
    check_broken_calls(session, kCreateHandle, kIdsCalls, COUNT(kIdsCalls));
    check_broken_calls(session, kCreateHandle, kLlCalls, COUNT(kLlCalls));
}

// Without max_tokens_per_rank the limit is on the sum over all ranks.
static void too_many_tokens(const EpEnv* env) {
    const unsigned most = INT32_MAX / (unsigned)env->size;
    Session session = {.env = env, .algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT};
    EP_REQUIRE_NCCL(open_auto_group(&session));
    EP_REFUSED_AS("handle-topk-rows-auto",
                  ep_handle_create(&session.handle, session.group, NULL, most + 1, kTopK, env->stream),
                  "got %u, expected %u or less", most + 1, most);
    ep_sync(env);
    EP_CHECK_NCCL(ncclEpGroupDestroy(session.group, env->stream));
}

EP_TEST_HT(ht_handle_arguments) {
    Session session = open_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    other_arguments(&session);
    check_broken_calls(&session, kCreateHandle, kIdsCalls, COUNT(kIdsCalls));
    check_broken_calls(&session, kCreateHandle, kHtLocalCalls, COUNT(kHtLocalCalls));
    finish_session(&session);
    too_many_tokens(env);
}

// ---- One rank against the others ---------------------------------------------------------------

// The odd rank's arguments are broken in this way; the others learn of it.
static void one_refuses(Session* session, const BrokenCall* broken) {
    char text[kMostText];
    const char* given = broken->given != NULL ? broken->given : "";
    if (is_odd(session->env)) check_broken_calls(session, kCreateHandle, broken, 1);
    else check_refused_elsewhere(session, odd_rank(session->env), write_refusal(broken->id, given, text));
    // The next creation succeeds and its handle works.
    EP_REQUIRE_NCCL(replace_handle(session, kTopK));
    check_works(session);
}

EP_TEST_HT(ht_handle_refused_by_one_rank) {
    if (!enough_ranks(env, 2, "handle-ht-rank-refused, *-ht-handle-refused")) return;
    Session session = open_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    for (size_t i = 0; i < COUNT(kIdsCalls); ++i) one_refuses(&session, &kIdsCalls[i]);
    one_refuses(&session, &kHtLocalCalls[0]);
    close_session(&session);
}
