// Accepted operations that fail while they run. ncclEpGetAsyncError shows the failure, which ends the group. The
// communicator and the stream stay usable, the group can be destroyed without a hang, and a new group works.
#define _GNU_SOURCE  // usleep
#include <unistd.h>

#include "harness/nodes.h"
#include "suites/errors/errors.h"

ncclResult_t wait_for_failure(const Session* session, double limit) {
    const double end = ep_seconds() + limit;
    ncclResult_t state = ncclSuccess;
    for (;;) {
        EP_REQUIRE_NCCL(ncclEpGetAsyncError(session->group, &state));
        if (state != ncclSuccess || ep_seconds() >= end) return state;
        usleep(2000);
    }
}

bool was_told(void) { return strstr(ep_last_error(), " failed: ") != NULL; }

bool on_some_rank(bool here) {
    int ranks = here;
    MPI_Allreduce(MPI_IN_PLACE, &ranks, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    return ranks > 0;
}

bool check_misses_odd_rank(const Session* session, double limit, const char* operation, const char* awaited,
                           const char* last) {
    const EpEnv* env = session->env;
    (void)wait_for_failure(session, limit);
    if (was_told()) {
        EP_REFUSED_AS("running-rank-failed", wait_for_failure(session, 0.0), "{%s}{*}{%d}{*}{%s of rank %d*}",
                      operation, env->rank, awaited, odd_rank(env));
        return false;
    }
    return EP_TEXT(
        "running-deadline", wait_for_failure(session, 0.0),
        "ncclEpGetAsyncError: %s: deadline passed: rank %d waited * ms for %s of rank %d, whose last one is %s",
        operation, env->rank, awaited, odd_rank(env), last);
}

// Whether this rank itself notices that the odd rank does not do its part of `kind`. In low latency
// every rank hears from every other. In high throughput only ranks that receive rows from the odd
// rank wait for it. A rank's tokens go to the ranks from its own onwards (fill_inputs).
static bool hears_odd_rank(const Session* session, CallKind kind) {
    const EpEnv* env = session->env;
    const bool returning = kind == kCombine || kind == kBackward;
    const int distance = returning ? odd_rank(env) - env->rank : env->rank - odd_rank(env);
    return session->algorithm == NCCL_EP_ALGO_LOW_LATENCY || (distance + env->size) % env->size < kTokens;
}

// The group has failed with `code`: every further call returns it at once, with the reason.
static void check_refuses_work(const Session* session, ncclResult_t code) {
    EP_FAILED("dispatch-group-failed", make_valid_call(session, kDispatch, 0), code, "{*}");
    EP_FAILED("combine-group-failed", make_valid_call(session, kCombine, 0), code, "{*}");
    EP_FAILED("complete-group-failed", ncclEpComplete(session->handle, NULL, session->env->stream), code, "{*}");
    EP_FAILED("count-rows-group-failed", ncclEpGroupCountRows(session->group, NULL), code, "{*}");
    EP_FAILED("time-waits-group-failed", ncclEpGroupTimeWaits(session->group, NULL), code, "{*}");
    EP_FAILED("time-combine-waits-group-failed", ncclEpGroupTimeCombineWaits(session->group, NULL), code, "{*}");
    EP_FAILED("handle-group-failed", make_valid_call(session, kCreateHandle, 0), code, "{*}");
}

void recover(Session* session) {
    const double start = ep_seconds();
    EP_CHECK_NCCL(ncclEpHandleDestroy(session->handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(session->group, session->env->stream));
    EP_CHECK(ep_seconds() - start < 5.0);
    ep_sync(session->env);
    ep_barrier();
    EP_REQUIRE_NCCL(open_group(session));
    EP_REQUIRE_NCCL(open_handle(session));
    check_works(session);
}

void recover_and_close(Session* session) {
    recover(session);
    close_session(session);
}

// ---- A rank that stops -------------------------------------------------------------------------

// Rank 1 starts to wait this much later.
static void stop_in(const EpEnv* env, ncclEpAlgorithm_t algorithm, unsigned timeout_ms, unsigned late_ms) {
    const char* operation =
        algorithm == NCCL_EP_ALGO_LOW_LATENCY ? "ncclEpDispatch (low latency)" : "ncclEpDispatch (high throughput)";
    Session session = open_timed_session(env, algorithm, timeout_ms);
    check_works(&session);
    ep_barrier();
    const bool is_late = late_ms > 0 && env->rank == 1;
    if (is_late) usleep(1000 * late_ms);
    if (!is_odd(env)) EP_CHECK_NCCL(make_valid_call(&session, kDispatch, 0));
    // On the CPU backend a dispatch waits for all ranks.
    const bool hears = ep_on_host_backend() || hears_odd_rank(&session, kDispatch);
    bool found_out = false;
    if (!is_odd(env) && hears) {
        const double limit = 0.001 * timeout_ms + 1.0;
        // On the CPU backend, creating a high-throughput handle is an operation as well.
        const bool counts_handle = ep_on_host_backend() && algorithm != NCCL_EP_ALGO_LOW_LATENCY;
        found_out =
            check_misses_odd_rank(&session, limit, operation, counts_handle ? "operation 4" : "*operation 3", "*");
        check_refuses_work(&session, ncclRemoteError);
    }
    EP_CHECK(on_some_rank(found_out));
    EP_CHECK(!(is_late && found_out));
    recover_and_close(&session);
}

static void rank_that_stops(const EpEnv* env, ncclEpAlgorithm_t algorithm) {
    enum { kTimeoutMs = 1500, kLateMs = 1000 };
    if (!enough_ranks(env, 2, "running-deadline, *-group-failed")) return;
    stop_in(env, algorithm, kShortTimeoutMs, 0);
    if (!enough_ranks(env, 3, "running-rank-failed")) return;
    // A rank that hears of another's deadline need not wait out its own. On the CPU backend a rank waits for one peer
    // after the other, and rank 0 starts with rank 1, so their deadlines pass together.
    if (!ep_on_host_backend()) stop_in(env, algorithm, kTimeoutMs, kLateMs);
}

EP_TEST(ll_rank_that_stops) {
    if (ep_num_nodes() > 1) return;  // nodes.c
    rank_that_stops(env, NCCL_EP_ALGO_LOW_LATENCY);
}

EP_TEST_HT(ht_rank_that_stops) {
    if (ep_num_nodes() > 1) return;  // nodes.c
    rank_that_stops(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
}

// ---- Outputs that are too small ----------------------------------------------------------------

// On the odd rank the tensor with tag `tag` has one row less than this rank receives. The other
// ranks learn of it in their next operation, if they wait for rows of that operation.
static void too_small(const EpEnv* env, CallKind kind, ListName list, unsigned tag, const char* id) {
    Session session = open_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    check_works(&session);
    ep_barrier();  // a failure also ends what other ranks have not finished
    CallTensors tensors;
    valid_tensors(&session, kind, &tensors);
    if (is_odd(env)) take_a_row(&tensors, list, tag);
    if (tag == NCCL_EP_TENSOR_TAG_SCALES) {  // on all ranks without rows, which come first
        TensorList* out = &tensors.lists[kOutputs];
        out->items[0] = out->items[--out->count];
    }
    const ncclResult_t launched = make_call(&session, kind, &tensors, 0);
    // On several nodes the host enqueues in steps, and may hear of the failure meanwhile.
    const bool knows = ep_num_nodes() > 1 && launched != ncclSuccess;
    EP_CHECK(launched == ncclSuccess || knows);
    if (is_odd(env)) {
        EP_REFUSED_AS(id, wait_for_failure(&session, 10.0), "{ncclEp%s (high throughput)}",
                      kind == kCombine ? "Combine" : "Dispatch");
        check_refuses_work(&session, ncclInvalidUsage);
    } else {
        // Accepted, unless the failure is known here already.
        const ncclResult_t next = make_valid_call(&session, kDispatch, 0);
        EP_CHECK(next == ncclSuccess || next == ncclRemoteError);
    }
    if (!is_odd(env) && ep_num_nodes() > 1) {
        EP_CHECK_EQ_I64(wait_for_failure(&session, 10.0), ncclRemoteError);
    } else if (!is_odd(env) && hears_odd_rank(&session, kDispatch)) {
        EP_REFUSED_AS("running-rank-failed", wait_for_failure(&session, 10.0), "{*}{*}{%d}", env->rank);
    }
    ep_barrier();
    recover_and_close(&session);
}

EP_TEST_HT(ht_outputs_too_small) {
    too_small(env, kDispatch, kOutputs, NCCL_EP_TENSOR_TAG_TOKENS, "running-ht-out-rows");
    too_small(env, kDispatch, kOutputs, NCCL_EP_TENSOR_TAG_TOPK_IDX, "running-ht-out-ids");
    too_small(env, kForward, kOutputs, NCCL_EP_TENSOR_TAG_SCALES, "running-ht-out-scales");
    too_small(env, kCombine, kInputs, NCCL_EP_TENSOR_TAG_TOKENS, "running-ht-in-rows");
}

// ---- One rank makes another call than the others -----------------------------------------------

void check_all_notice(Session* session, CallKind kind, const char* id, const char* values) {
    const EpEnv* env = session->env;
    char named[16] = "*";
    if (!is_odd(env)) snprintf(named, sizeof(named), "%d", odd_rank(env));
    const bool hears = hears_odd_rank(session, kind);
    const ncclResult_t state = hears ? wait_for_failure(session, 10.0) : ncclSuccess;
    if (state == ncclRemoteError) {
        EP_REFUSED_AS("running-rank-failed", wait_for_failure(session, 0.0), "{*}{*}{%d}", env->rank);
    } else if (hears) {
        EP_REFUSED_AS(id, wait_for_failure(session, 0.0), "{*}{%s}%s", named, values);
    }
    EP_CHECK(on_some_rank(state == ncclInvalidUsage));
    recover_and_close(session);
}

// Gives the session the handle that this rank uses; returns the other one, if there are two.
static ncclResult_t take_handle(Session* session, const OtherCall* call, bool is_odd, ncclEpHandle_t* other) {
    *other = NULL;
    if (call->handle == kSameHandle || (call->handle == kOwnHandle && !is_odd)) return ncclSuccess;
    ncclEpHandle_t made = NULL;
    const ncclResult_t result = ep_handle_create(&made, session->group, session->ids, kTokens,
                                                 kTopK - call->fewer_ids, session->env->stream);
    if (result != ncclSuccess) return result;
    const bool is_older = call->handle == kOlderHandle && is_odd;
    *other = is_older ? made : session->handle;
    if (!is_older) session->handle = made;
    return ncclSuccess;
}

ncclResult_t make_one_of(Session* session, const OtherCall* call, bool is_odd) {
    ncclEpHandle_t other;
    const ncclResult_t taken = take_handle(session, call, is_odd, &other);
    if (taken != ncclSuccess) return taken;
    // The difference comes when all have their handles: where it comes before, making one fails, too.
    if (call->handle == kOlderHandle) ep_barrier();
    const CallKind kind = is_odd ? call->odd_kind : call->kind;
    const bool is_staged = call->staging == (is_odd ? kOddStaged : kOddWhole);
    CallTensors tensors;
    valid_tensors(session, kind, &tensors);
    if (is_odd && call->change != NULL) call->change(&tensors);
    const ncclResult_t result = make_call(session, kind, &tensors, is_staged);
    // Which may be refused or fail, as the difference is known by then.
    if (is_staged) (void)ncclEpComplete(session->handle, NULL, session->env->stream);
    if (other != NULL) EP_CHECK_NCCL(ncclEpHandleDestroy(other));
    return result;
}

void check_other_call(const EpEnv* env, const OtherCall* call) {
    Session session = open_session(env, call->algorithm);
    check_works(&session);
    ep_barrier();
    EP_CHECK_NCCL(make_one_of(&session, call, is_odd(env)));
    char values[128] = "";
    if (call->usual != NULL) {
        snprintf(values, sizeof(values), "got %s, expected %s", is_odd(env) ? call->odd : call->usual,
                 is_odd(env) ? call->usual : call->odd);
    }
    check_all_notice(&session, call->kind, call->id, values);
}

void shorten_rows(CallTensors* tensors) {
    tensors->lists[kInputs].views[0].sizes[1] = 8;
    EpView* out = &tensors->lists[kOutputs].views[0];
    out->sizes[out->tensor.ndim - 1] = 8;
}

void make_float16(CallTensors* tensors) {
    for (ListName list = kInputs; list <= kOutputs; ++list) {
        for (unsigned i = 0; i < tensors->lists[list].count; ++i) {
            ncclNDTensor_t* tensor = &tensors->lists[list].views[i].tensor;
            if (tensor->tag == NCCL_EP_TENSOR_TAG_TOKENS) tensor->datatype = ncclFloat16;
        }
    }
}

#define LL NCCL_EP_ALGO_LOW_LATENCY
#define HT NCCL_EP_ALGO_HIGH_THROUGHPUT
#define OTHER_ROWS(mode) \
    {mode, kDispatch, kDispatch, shorten_rows, "running-row-bytes", "32", "16"}
#define OTHER_TYPE(mode, kind) \
    {mode, kind, kind, make_float16, "running-data-type", "bfloat16", "float16"}

#define OTHER_STAGING(kind, staging) \
    {LL, kind, kind, NULL, "running-ll-send-only", NULL, NULL, staging}

const OtherCall kOtherLlCalls[kNumOtherLlCalls] = {
    {LL, kDispatch, kCombine, NULL, "running-operation", "ncclEpDispatch (low latency)", "ncclEpCombine (low latency)"},
    OTHER_ROWS(LL),
    OTHER_TYPE(LL, kDispatch),
    OTHER_TYPE(LL, kCombine),
    {LL, kDispatch, kDispatch, NULL, "running-ll-columns", "2", "1", .handle = kOwnHandle, .fewer_ids = 1},
    OTHER_STAGING(kDispatch, kOddStaged),
    OTHER_STAGING(kDispatch, kOddWhole),
    OTHER_STAGING(kCombine, kOddStaged),
    OTHER_STAGING(kCombine, kOddWhole),
};

const OtherCall kOtherHtCalls[kNumOtherHtCalls] = {
    OTHER_ROWS(HT),
    OTHER_TYPE(HT, kDispatch),
    OTHER_TYPE(HT, kTokensOnly),
    OTHER_TYPE(HT, kCombine),
    OTHER_TYPE(HT, kBackward),
    {HT, kDispatch, kTokensOnly, NULL, "running-ht-forward", NULL, NULL},
    {HT, kBackward, kCombine, NULL, "running-ht-columns", "2", "0"},
    {HT, kDispatch, kDispatch, NULL, "running-ht-other-handle", NULL, NULL, .handle = kOlderHandle},
};

EP_TEST(ll_different_calls_on_one_rank) {
    if (!enough_ranks(env, 2, "running-operation, -row-bytes, -data-type, -ll-*")) return;
    if (ep_num_nodes() > 1) return;  // nodes.c
    for (size_t i = 0; i < kNumOtherLlCalls; ++i) check_other_call(env, &kOtherLlCalls[i]);
}

EP_TEST_HT(ht_different_calls_on_one_rank) {
    if (ep_num_nodes() > 1) return;  // nodes.c
    if (!enough_ranks(env, 2, "running-row-bytes, running-data-type, running-ht-*")) return;
    for (size_t i = 0; i < kNumOtherHtCalls; ++i) check_other_call(env, &kOtherHtCalls[i]);
}
