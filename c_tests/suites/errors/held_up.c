// Operations that do not begin, as work of the program stands before them on their stream.
#define _GNU_SOURCE  // usleep
#include <unistd.h>

#include "harness/nodes.h"
#include "suites/errors/errors.h"

static void hold(void* closed) {
    Gate* gate = closed;
    const double start = ep_seconds();
    while (atomic_load(&gate->is_closed) && ep_seconds() - start < gate->seconds) usleep(100);
}

void close_gate(Gate* gate, const EpEnv* env, double seconds) {
    atomic_init(&gate->is_closed, true);
    gate->seconds = seconds;
    EP_REQUIRE_CUDA(cudaLaunchHostFunc(env->stream, hold, gate));
}

void open_gate(Gate* gate) { atomic_store(&gate->is_closed, false); }

// The end of a group does not wait for them for ever, though their own deadline has not begun.
static void end_behind_a_gate(const EpEnv* env, ncclEpAlgorithm_t algorithm) {
    Session session = open_timed_session(env, algorithm, kShortTimeoutMs);
    check_works(&session);
    ep_barrier();
    Gate gate;
    close_gate(&gate, env, 0.01 * kShortTimeoutMs);
    EP_CHECK_NCCL(make_valid_call(&session, kDispatch, 0));
    const double start = ep_seconds();
    EP_LOST("group-held-up", ncclEpGroupDestroy(session.group, env->stream),
            "ncclEpGroupDestroy: its operations have not ended within * ms");
    const double waited = ep_seconds() - start;
    EP_CHECK(waited >= 0.002 * kShortTimeoutMs && waited < 0.002 * kShortTimeoutMs + 1.0);
    open_gate(&gate);
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
    Gate gate;
    close_gate(&gate, env, 0.01 * kShortTimeoutMs);
    const double start = ep_seconds();
    EP_LOST("handle-ht-held-up", open_handle(&session),
            "ncclEpCreateHandle: the handle's routing was not exchanged within %u ms, without word of ranks [0*",
            2 * kShortTimeoutMs);
    const double waited = ep_seconds() - start;
    EP_CHECK(waited >= 0.002 * kShortTimeoutMs && waited < 0.002 * kShortTimeoutMs + 1.0);
    ep_barrier();
    open_gate(&gate);
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
