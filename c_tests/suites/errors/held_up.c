// Operations that do not begin, as work of the program stands before them on their stream.
#include "harness/nodes.h"
#include "suites/errors/errors.h"

// The end of a group does not wait for them for ever, though their own deadline has not begun.
static void end_behind_a_gate(const EpEnv* env, ncclEpAlgorithm_t algorithm) {
    Session session = open_timed_session(env, algorithm, kShortTimeoutMs);
    check_works(&session);
    ep_barrier();
    EpGate gate;
    ep_gate_close(&gate, env->stream);
    EP_CHECK_NCCL(make_valid_call(&session, kDispatch, 0));
    const double start = ep_seconds();
    EP_REFUSED("group-held-up", ncclEpGroupDestroy(session.group, env->stream));
    const double waited = ep_seconds() - start;
    EP_CHECK(waited >= 0.002 * kShortTimeoutMs && waited < 0.002 * kShortTimeoutMs + 1.0);
    ep_gate_open(&gate);
    (void)cudaStreamSynchronize(env->stream);
    ep_barrier();
    EP_CHECK_NCCL(open_group(&session));
    EP_CHECK_NCCL(ncclEpHandleDestroy(session.handle));
    EP_CHECK_NCCL(open_handle(&session));
    finish_session(&session);
}

// Nor does the creation of a handle, where it waits for its place on the stream.
EP_TEST_HT(ht_handle_behind_a_gate) {
    if (!ep_on_host_backend()) return;
    Session session = open_timed_session(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, kShortTimeoutMs);
    check_works(&session);
    EP_CHECK_NCCL(ncclEpHandleDestroy(session.handle));
    ep_barrier();
    EpGate gate;
    ep_gate_close(&gate, env->stream);
    const double start = ep_seconds();
    EP_REFUSED_AS("handle-ht-held-up", open_handle(&session), "{%u}{[0*}", 2 * kShortTimeoutMs);
    const double waited = ep_seconds() - start;
    EP_CHECK(waited >= 0.002 * kShortTimeoutMs && waited < 0.002 * kShortTimeoutMs + 1.0);
    ep_barrier();
    ep_gate_open(&gate);
    (void)cudaStreamSynchronize(env->stream);
    session.handle = NULL;
    recover_and_close(&session);
}

EP_TEST(ll_group_behind_a_gate) {
    if (ep_num_nodes() == 1) end_behind_a_gate(env, NCCL_EP_ALGO_LOW_LATENCY);
}
EP_TEST_HT(ht_group_behind_a_gate) {
    if (ep_num_nodes() == 1) end_behind_a_gate(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
}
