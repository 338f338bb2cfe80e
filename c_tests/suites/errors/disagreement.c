// Ranks that disagree on a high-throughput handle: one refuses, one has another number of ids per token, one never
// calls. The CPU backend notices in ncclEpCreateHandle, where the host waits. On GPUs the host does not wait: the call
// returns a handle, calls on it are refused once the exchange has run, and an operation enqueued before that fails
// together with its group. On GPUs of several nodes the host waits, too.
#include "harness/nodes.h"
#include "suites/errors/errors.h"

#define REMOTE ncclRemoteError
#define REFUSED "{%d}{ncclInvalidArgument}"
#define DIFFERS "{%d} got %d, expected %d as on rank %d"
#define FEWER "got 3, expected 4 or more"

enum { kOtherTopK = 1 };

// The first rank with another number of ids per token than this one, and that number.
static int differs(const EpEnv* env) { return is_odd(env) ? 0 : odd_rank(env); }
static int my_top_k(const EpEnv* env) { return is_odd(env) ? kOtherTopK : kTopK; }
static int their_top_k(const EpEnv* env) { return is_odd(env) ? kTopK : kOtherTopK; }

// Whether ncclEpCreateHandle knows what the ranks do not agree on.
static bool creation_waits(void) { return ep_on_host_backend() || ep_num_nodes() > 1; }

static ncclResult_t create(const Session* session, unsigned top_k, ncclEpHandle_t* handle) {
    EpView ids;
    ep_view_2d(&ids, session->ids, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, kTokens, top_k);
    EpView counter;
    ep_view_1d(&counter, session->counter, ncclInt32, NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, kLocalExperts);
    ncclNDTensor_t* locals[] = {&counter.tensor};
    return ncclEpCreateHandle(handle, session->group, &ids.tensor, locals, 1, NULL, session->env->stream, false);
}

ncclResult_t replace_handle(Session* session, unsigned top_k) {
    EP_CHECK_NCCL(ep_handle_destroy(&session->handle));
    return create(session, top_k, &session->handle);
}

// This rank refuses its handle for too many ids per token, at once.
static void refuse(const Session* session) {
    ncclEpHandle_t handle = NULL;
    EP_REFUSED("handle-topk-columns", create(session, 33, &handle));
    EP_CHECK(handle == NULL);
}

// No rank sends anything on such a handle, so the counters stay as they were.
static void check_nothing_counted(const Session* session) {
    int32_t counts[kLocalExperts];
    const int32_t none[kLocalExperts] = {0};
    ep_download(counts, session->counter, sizeof(counts));
    EP_CHECK_EQ_BYTES(counts, none, sizeof(none));
}

void check_refused_elsewhere(Session* session, int refuser, const char* text) {
    if (ep_on_host_backend()) {
        ncclEpHandle_t handle = NULL;
        EP_REFUSED_AS("handle-ht-rank-refused", create(session, kTopK, &handle), "{%d}{%s}", refuser, text);
        EP_CHECK(handle == NULL);
        return;
    }
    if (creation_waits()) {
        EP_REFUSED_AS("handle-ht-handle-refused", replace_handle(session, kTopK), REFUSED, refuser);
        EP_CHECK(session->handle == NULL);
        check_nothing_counted(session);
        EP_CHECK_EQ_I64(wait_for_failure(session, 0.0), ncclSuccess);
        return;
    }
    EP_CHECK_NCCL(replace_handle(session, kTopK));
    ep_sync(session->env);
    EP_REFUSED_AS("dispatch-ht-handle-refused", make_valid_call(session, kDispatch, 0), REFUSED, refuser);
    EP_REFUSED_AS("combine-ht-handle-refused", make_valid_call(session, kCombine, 0), REFUSED, refuser);
    check_nothing_counted(session);
    EP_CHECK_EQ_I64(wait_for_failure(session, 0.0), ncclSuccess);
}

// ---- Another number of ids per token -----------------------------------------------------------

EP_TEST_HT(ht_handle_with_another_top_k) {
    if (!enough_ranks(env, 2, "*-ht-topk-differs, *-ht-handle-differs")) return;
    Session session = open_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    const unsigned top_k = (unsigned)my_top_k(env);
    if (creation_waits()) {
        ncclEpHandle_t handle = NULL;
        EP_REFUSED_AS("handle-ht-topk-differs", create(&session, top_k, &handle),
                      DIFFERS, differs(env), my_top_k(env), their_top_k(env), differs(env));
        EP_CHECK(handle == NULL);
    } else {
        EP_CHECK_NCCL(replace_handle(&session, top_k));
        ep_sync(env);
        EP_REFUSED_AS("dispatch-ht-handle-differs", make_valid_call(&session, kTokensOnly, 0),
                      DIFFERS, differs(env), my_top_k(env), their_top_k(env), differs(env));
        EP_REFUSED_AS("combine-ht-handle-differs", make_valid_call(&session, kCombine, 0),
                      DIFFERS, differs(env), my_top_k(env), their_top_k(env), differs(env));
        check_nothing_counted(&session);
    }
    EP_REQUIRE_NCCL(replace_handle(&session, kTopK));
    finish_session(&session);
}

// ---- NCCL_EP_AUTO: the caller asks for the number of received tokens ---------------------------

static void no_count_after_a_refusal(Session* session) {
    const EpEnv* env = session->env;
    unsigned rows = 77;
    if (is_odd(env)) {
        refuse(session);
    } else {
        EP_CHECK_NCCL(create(session, kTopK, &session->handle));
        EP_REFUSED_AS("num-recv-ht-handle-refused", ncclEpHandleGetNumRecvTokens(session->handle, &rows),
                      REFUSED, odd_rank(env));
        EP_CHECK_NCCL(ncclEpHandleDestroy(session->handle));
        EP_CHECK_EQ_I64(rows, 77);
    }
}

static void no_count_of_different_handles(Session* session) {
    const EpEnv* env = session->env;
    unsigned rows = 77;
    EP_CHECK_NCCL(create(session, (unsigned)my_top_k(env), &session->handle));
    EP_REFUSED_AS("num-recv-ht-handle-differs", ncclEpHandleGetNumRecvTokens(session->handle, &rows),
                  DIFFERS, differs(env), my_top_k(env), their_top_k(env), differs(env));
    EP_CHECK_EQ_I64(rows, 77);
    EP_CHECK_NCCL(ncclEpHandleDestroy(session->handle));
}

// One row less than the caller was told of.
static ncclResult_t call_with_fewer(const Session* session, CallKind kind, ListName list, unsigned tag) {
    CallTensors tensors;
    valid_tensors(session, kind, &tensors);
    take_a_row(&tensors, list, tag);
    return make_call(session, kind, &tensors, 0);
}

static void refuse_fewer_than_told(const Session* session) {
    EP_REFUSED_AS("dispatch-ht-out-told", call_with_fewer(session, kDispatch, kOutputs, NCCL_EP_TENSOR_TAG_TOKENS),
                  FEWER);
    EP_REFUSED_AS("dispatch-ht-out-ids-told",
                  call_with_fewer(session, kDispatch, kOutputs, NCCL_EP_TENSOR_TAG_TOPK_IDX), FEWER);
    EP_REFUSED_AS("combine-ht-in-told", call_with_fewer(session, kCombine, kInputs, NCCL_EP_TENSOR_TAG_TOKENS),
                  FEWER);
}

EP_TEST_HT(ht_handle_without_a_count) {
    if (!enough_ranks(env, 2, "num-recv-ht-handle-*")) return;
    Session session = open_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    EP_CHECK_NCCL(ncclEpHandleDestroy(session.handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(session.group, env->stream));
    EP_REQUIRE_NCCL(open_auto_group(&session));
    if (!creation_waits()) {
        for (int i = 0; i < 3; ++i) no_count_after_a_refusal(&session);
        no_count_of_different_handles(&session);
    }
    unsigned rows = 0;
    EP_REQUIRE_NCCL(create(&session, kTopK, &session.handle));
    EP_CHECK_NCCL(ncclEpHandleGetNumRecvTokens(session.handle, &rows));
    EP_CHECK_EQ_I64(rows, kTokens);
    refuse_fewer_than_told(&session);
    finish_session(&session);
}

// ---- Operations enqueued before the host can know ----------------------------------------------

// Creates a handle on which the ranks disagree and calls `kind` on it while the stream is blocked.
static void use_at_once(Session* session, bool refused, CallKind kind) {
    const EpEnv* env = session->env;
    EpGate gate;
    EP_CHECK_NCCL(ep_handle_destroy(&session->handle));
    ep_gate_close(&gate, env->stream);
    if (refused && is_odd(env)) {
        refuse(session);
    } else {
        EP_REQUIRE_NCCL(create(session, refused ? kTopK : (unsigned)my_top_k(env), &session->handle));
        EP_CHECK_NCCL(make_valid_call(session, kind, 0));
        EP_CHECK_NCCL(make_valid_call(session, kind, 0));
    }
    ep_gate_open(&gate);
    ep_sync(env);
}

// The group has failed, either for that reason or because another rank reported its own failure
// first; at least one rank knows the reason. An odd rank that refused has nothing enqueued and
// learns of it from its next call at the latest.
static void check_failed(Session* session, bool refused, CallKind kind) {
    const EpEnv* env = session->env;
    if (refused && is_odd(env)) {
        const ncclResult_t created = create(session, kTopK, &session->handle);
        EP_CHECK(created == ncclSuccess || created == REMOTE);
    }
    const ncclResult_t state = wait_for_failure(session, 10.0);
    const char* name = kind == kCombine ? "ncclEpCombine" : "ncclEpDispatch";
    const bool knows = !was_told();
    if (!knows) {
        EP_REFUSED_AS("running-rank-failed", wait_for_failure(session, 0.0), "{*}{*}{%d}", env->rank);
    } else if (refused) {
        EP_REFUSED_AS("running-ht-handle-refused", wait_for_failure(session, 0.0),
                      "{%s (high throughput)}" REFUSED, name, odd_rank(env));
    } else {
        EP_REFUSED_AS("running-ht-handle-differs", wait_for_failure(session, 0.0),
                      "{%s (high throughput)}" DIFFERS, name, differs(env), my_top_k(env), their_top_k(env),
                      differs(env));
    }
    EP_CHECK(state != ncclSuccess);
    EP_CHECK(on_some_rank(knows));
    // The odd rank's own refusal does not fail its group.
    EP_CHECK(!(refused && is_odd(env)) || !knows);
}

EP_TEST_HT(ht_handle_used_before_it_is_known) {
    if (!enough_ranks(env, 2, "running-ht-handle-refused, running-ht-handle-differs")) return;
    if (creation_waits()) return;  // the host knows at once
    Session session = open_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    const CallKind kinds[] = {kTokensOnly, kCombine};
    for (size_t i = 0; i < 2 * COUNT(kinds); ++i) {
        const bool refused = i < COUNT(kinds);
        const CallKind kind = kinds[i % COUNT(kinds)];
        check_works(&session);
        ep_barrier();
        use_at_once(&session, refused, kind);
        check_failed(&session, refused, kind);
        recover(&session);
    }
    close_session(&session);
}

// ---- A rank that never calls -------------------------------------------------------------------

// This is the group's second operation, after the session's own handle.
static void missing_on_the_host(EpEnv* env) {
    Session session = open_timed_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, kShortTimeoutMs);
    bool found_out = false;
    ep_barrier();
    if (!is_odd(env)) {
        const double limit = 0.001 * kShortTimeoutMs + 1.0;
        EP_TEXT("handle-ht-rank-missing", make_valid_call(&session, kCreateHandle, 0),
                "ncclEpCreateHandle: *: rank %d waited * ms for operation 2 of rank %d*", env->rank, odd_rank(env));
        found_out = check_misses_odd_rank(&session, limit, "ncclEpCreateHandle", "operation 2", "1");
    }
    EP_CHECK(on_some_rank(found_out));
    recover_and_close(&session);
}

static void missing_on_the_device(EpEnv* env) {
    Session session = open_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    EP_CHECK_NCCL(ncclEpHandleDestroy(session.handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(session.group, env->stream));
    set_timeout_ms(kShortTimeoutMs);
    EP_REQUIRE_NCCL(open_auto_group(&session));
    set_timeout_ms(0);
    session.handle = NULL;
    bool found_out = false;
    ep_barrier();
    if (!is_odd(env)) {
        const double limit = 0.001 * kShortTimeoutMs + 1.0;
        unsigned rows = 77;
        EP_CHECK_NCCL(create(&session, kTopK, &session.handle));
        EP_CHECK_NCCL(make_valid_call(&session, kTokensOnly, 0));
        found_out = check_misses_odd_rank(&session, limit, "ncclEpCreateHandle", "the row counts of operation 1", "0");
        EP_CHECK_RESULT(ncclEpHandleGetNumRecvTokens(session.handle, &rows), REMOTE);
        EP_CHECK_EQ_I64(rows, 77);
        EP_FAILED("dispatch-group-failed", make_valid_call(&session, kTokensOnly, 0), ncclRemoteError,
                  "{ncclEpCreateHandle: %s: *}", found_out ? "deadline passed" : "rank * failed");
    }
    EP_CHECK(on_some_rank(found_out));
    recover_and_close(&session);
}

// A rank hears of it from the network, or from a rank of its node.
static void missing_over_nodes(EpEnv* env) {
    Session session = open_timed_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, kShortTimeoutMs);
    ep_barrier();
    if (!is_odd(env)) {
        const double start = ep_seconds();
        ncclEpHandle_t handle = NULL;
        EP_CHECK_RESULT(create(&session, kTopK, &handle), REMOTE);
        EP_CHECK(handle == NULL);
        EP_CHECK(ep_seconds() - start < 0.001 * kShortTimeoutMs + 1.0);
        EP_CHECK_EQ_I64(wait_for_failure(&session, 10.0), REMOTE);
    }
    ep_barrier();
    recover_and_close(&session);
}

EP_TEST_HT(ht_handle_with_a_missing_rank) {
    if (!enough_ranks(env, 2, "handle-ht-rank-missing, running-deadline")) return;
    if (ep_on_host_backend()) {
        missing_on_the_host(env);
    } else if (ep_num_nodes() > 1) {
        missing_over_nodes(env);
    } else {
        missing_on_the_device(env);
    }
}

// ---- A rank whose group has failed without the others knowing ----------------------------------

// That rank is refused its handle at once. The others must not wait for it until the deadline, and
// must leave nothing on the communicator, which the next group uses.
EP_TEST_HT(ht_handle_after_one_rank_failed) {
    if (!enough_ranks(env, 2, "a handle after one rank failed")) return;
    Session session = open_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    CallTensors tensors;
    valid_tensors(&session, kTokensOnly, &tensors);
    if (is_odd(env)) tensors.lists[kOutputs].views[0].sizes[0] = kTokens - 1;
    EP_CHECK_NCCL(make_call(&session, kTokensOnly, &tensors, 0));
    ep_sync(env);
    if (is_odd(env)) EP_CHECK_EQ_I64(wait_for_failure(&session, 10.0), ncclInvalidUsage);
    ep_barrier();
    const double start = ep_seconds();
    ncclEpHandle_t handle = NULL;
    const ncclResult_t result = create(&session, kTopK, &handle);
    if (is_odd(env)) {
        EP_CHECK_EQ_I64(result, ncclInvalidUsage);
    } else {
        EP_CHECK(result == REMOTE || (result == ncclSuccess && !ep_on_host_backend()));
        EP_CHECK_EQ_I64(wait_for_failure(&session, 10.0), REMOTE);
    }
    // The deadline is 100 s.
    EP_CHECK(ep_seconds() - start < 10.0);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    recover_and_close(&session);
}
