// Ranks of several nodes that do not do the same. A rank or a whole node calls something else than the others, whose
// messages may have the same sizes. Every rank gets an error within the deadline and a second, and a new group works.
// The same holds where a stream never reaches what ranks tell each other, after twice the deadline.
#include "harness/nodes.h"

#include "suites/errors/errors.h"

// A group over nodes, and an operation on it, take their time where ranks share a processor.
enum { kTimeoutMs = 4 * kShortTimeoutMs };
enum { kTooManyIds = 33 };  // of a token

// Who does something else.
typedef enum { kOneRank, kItsNode, kNumOthers } Others;

static bool is_other(const EpEnv* env, Others who) {
    const unsigned distance = ep_node_distance((unsigned)env->rank, (unsigned)odd_rank(env));
    return who == kOneRank ? is_odd(env) : distance == 0;
}

// What this rank does of `call`; NULL: the others make none. Calls may be refused already.
static void make_part(Session* session, const OtherCall* call, bool other) {
    if (call == NULL) {
        if (!other) (void)make_valid_call(session, kDispatch, 0);
        return;
    }
    const ncclResult_t result = make_one_of(session, call, other);
    if (!other || call->handle != kOwnHandle || session->algorithm == NCCL_EP_ALGO_LOW_LATENCY) return;
    // All ranks make a handle of high throughput together.
    EP_CHECK(result != ncclSuccess && result != ncclInternalError);
    EP_CHECK_STR_CONTAINS(ep_last_error(), "rank ");
}

static void expect_failure(const Session* session, double limit) {
    const double start = ep_seconds();
    const ncclResult_t state = wait_for_failure(session, limit);
    EP_CHECK(ep_seconds() - start <= limit);
    EP_CHECK(state == ncclRemoteError || state == ncclInvalidUsage || state == ncclInvalidArgument);
    EP_CHECK_STR_CONTAINS(ep_last_error(), "rank ");
    EP_CHECK(make_valid_call(session, kDispatch, 0) != ncclSuccess);
    EP_CHECK_STR_CONTAINS(ep_last_error(), "the group has failed");
}

static void differ(const EpEnv* env, ncclEpAlgorithm_t algorithm, const OtherCall* call, Others who) {
    const uint64_t failed = ep_failed();
    const bool other = is_other(env, who);
    // So that the time begins for all together.
    ep_barrier();
    Session session = open_timed_session(env, algorithm, kTimeoutMs);
    check_works(&session);
    ep_barrier();
    make_part(&session, call, other);
    // Who calls nothing waits for nothing.
    if (!other || call != NULL) expect_failure(&session, 0.001 * kTimeoutMs + 1.0);
    // On the stand-ins, messages of different sizes leave an error on the stream.
    if (ep_on_hostsim() && call != NULL) (void)cudaStreamSynchronize(env->stream);
    ep_barrier();
    recover_and_close(&session);
    if (ep_failed() != failed) {
        fprintf(stderr, "rank %d: above, %s differs: %s\n", env->rank, who == kOneRank ? "one rank" : "a node",
                call != NULL ? call->id : "no call");
    }
}

// Those of one node, and such as have no text of their own there.
static void all_differ(const EpEnv* env, ncclEpAlgorithm_t algorithm, const OtherCall* calls, size_t num_calls) {
    const bool ht = algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT;
    const OtherCall operation = {algorithm, kDispatch, kCombine, .id = "another operation"};
    const OtherCall handle = {algorithm, kDispatch, kDispatch, .id = "another handle", .handle = kOlderHandle};
    const OtherCall more[] = {
        {algorithm, kForward, kForward, remove_scales, "rows without scales"},
        {algorithm, kDispatch, kDispatch, .id = "a handle that others have not made", .handle = kOwnHandle},
        ht ? operation : handle};
    for (Others who = kOneRank; who < kNumOthers; ++who) {
        differ(env, algorithm, NULL, who);
        for (size_t i = 0; i < num_calls; ++i) differ(env, algorithm, &calls[i], who);
        for (size_t i = 0; i < COUNT(more); ++i) {
            // On the CPU backend it does not matter which of two like handles a rank of low latency uses.
            if (ht || more[i].handle == kSameHandle || !ep_on_host_backend()) differ(env, algorithm, &more[i], who);
        }
    }
}

EP_TEST(ll_different_calls_over_nodes) {
    if (ep_num_nodes() > 1) all_differ(env, NCCL_EP_ALGO_LOW_LATENCY, kOtherLlCalls, kNumOtherLlCalls);
}

EP_TEST_HT(ht_different_calls_over_nodes) {
    if (ep_num_nodes() > 1) all_differ(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, kOtherHtCalls, kNumOtherHtCalls);
}

// A rank finds no memory for its part of a handle, before the others count on it: all refuse the handle, and the group
// goes on. Only the CPU build can have no memory on demand.
EP_TEST_HT(ht_handle_without_memory_over_nodes) {
    if (ep_num_nodes() == 1 || !ep_on_cpu_build()) return;
    Session session = open_timed_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, 10 * kTimeoutMs);
    check_works(&session);
    // The memory of the first handle is in use.
    const ncclEpHandle_t first = session.handle;
    session.handle = NULL;
    if (is_odd(env)) ep_set_mishap(kEpNoMemory, true);
    const double start = ep_seconds();
    EP_CHECK(open_handle(&session) != ncclSuccess);
    EP_CHECK(ep_seconds() - start < 0.005 * kTimeoutMs);  // long before the deadline
    EP_CHECK(session.handle == NULL);
    EP_CHECK_STR_CONTAINS(ep_last_error(), is_odd(env) ? "out of memory" : "rank ");
    ep_set_mishap(kEpNoMemory, false);
    EP_CHECK_NCCL(open_handle(&session));
    check_works(&session);
    EP_CHECK_NCCL(ncclEpHandleDestroy(session.handle));
    session.handle = first;
    check_works(&session);
    close_session(&session);
}

// A rank refuses its part of a handle, for its ids or as it finds no memory: those that forward for it, here all the
// others, refuse operations on theirs, and the group goes on.
EP_TEST(ll_handle_refused_over_nodes) {
    if (ep_num_nodes() == 1 || (int)ep_num_nodes() < env->size || ep_on_host_backend()) return;
    Session session = open_timed_session(env, NCCL_EP_ALGO_LOW_LATENCY, 10 * kTimeoutMs);
    check_works(&session);
    for (int without_memory = 0; without_memory <= ep_on_cpu_build(); ++without_memory) {
        Session refused = session;
        const unsigned top_k = is_odd(env) && !without_memory ? kTooManyIds : kTopK;
        if (is_odd(env) && without_memory) ep_set_mishap(kEpNoMemory, true);
        const ncclResult_t made =
            ep_handle_create(&refused.handle, session.group, session.ids, kTokens, top_k, env->stream);
        ep_set_mishap(kEpNoMemory, false);
        EP_CHECK((made != ncclSuccess) == is_odd(env));
        const double start = ep_seconds();
        for (unsigned again = 0; again < 2 && made == ncclSuccess; ++again) {
            EP_CHECK(make_valid_call(&refused, kDispatch, 0) == ncclRemoteError);
            EP_CHECK_STR_CONTAINS(ep_last_error(), "handle: ");
        }
        EP_CHECK(ep_seconds() - start < 0.005 * kTimeoutMs);  // long before the deadline
        if (made == ncclSuccess) EP_CHECK_NCCL(ncclEpHandleDestroy(refused.handle));
        check_works(&session);
    }
    const ncclEpHandle_t first = session.handle;
    EP_CHECK_NCCL(open_handle(&session));
    check_works(&session);
    EP_CHECK_NCCL(ncclEpHandleDestroy(session.handle));
    session.handle = first;
    close_session(&session);
}

// ---- A stream that is held up ------------------------------------------------------------------

// A gate before a dispatch holds up the network behind it, and so what ranks say of a new handle: on all ranks or, if
// `alone`, on the odd rank. The new handle's first operation waits for that, on the host.
static void hold_up_a_new_handle(const EpEnv* env, bool alone) {
    ep_barrier();
    Session session = open_timed_session(env, NCCL_EP_ALGO_LOW_LATENCY, kTimeoutMs);
    // Four operations: both phases of a staged one are one.
    check_works(&session);
    for (unsigned i = 0; i < 2; ++i) {
        EP_CHECK_NCCL(make_valid_call(&session, kDispatch, 1));
        EP_CHECK_NCCL(ncclEpComplete(session.handle, NULL, env->stream));
    }
    ep_sync(env);
    Session late = session;
    const bool is_held = !alone || is_odd(env);
    EpGate gate;
    if (is_held) ep_gate_close(&gate, env->stream);
    EP_CHECK_NCCL(make_valid_call(&session, kDispatch, 0));
    EP_CHECK_NCCL(open_handle(&late));
    ep_barrier();
    const double start = ep_seconds();
    forget_last_error();
    const ncclResult_t result = make_valid_call(&late, kDispatch, 0);
    // Its rows may be on their way to ranks that are not held up, which wait for others then.
    EP_CHECK(result == ncclRemoteError || (!is_held && result == ncclSuccess));
    const bool knows = fits(ep_last_error(),
                            "ncclEpDispatch: deadline passed: rank * waited * ms for rank * in network "
                            "operation *, LL handle 2, behind network operation *, LL dispatch 5");
    EP_CHECK(alone || on_some_rank(knows));
    expect_failure(&session, 0.002 * kTimeoutMs + 1.0);
    EP_CHECK(ep_seconds() - start <= 0.002 * kTimeoutMs + 1.0);
    if (is_held) ep_gate_open(&gate);
    (void)cudaStreamSynchronize(env->stream);
    EP_CHECK_NCCL(ncclEpHandleDestroy(late.handle));
    ep_barrier();
    recover_and_close(&session);
}

EP_TEST(ll_new_handle_held_up_over_nodes) {
    // The CPU backend needs no word of other ranks about a handle.
    if (ep_num_nodes() == 1 || ep_on_host_backend()) return;
    hold_up_a_new_handle(env, false);
    hold_up_a_new_handle(env, true);
}
