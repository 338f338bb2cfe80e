// High-throughput operations in graphs, and rows with scales in graphs of both modes. The handles'
// routing is fixed; tokens, scales, weights, results and gradients are new in each replay.
#include "harness/graphs.h"
#include "suites/graph/pairs.h"

enum { kReplays = 4, kLateReplays = 6 };

static const ncclDataType_t kE4m3 = (ncclDataType_t)10;
static const HtPass kForward = {.forward = true};
static const HtPass kCached = {.forward = false};

// ---- A handle that goes forward, and one that goes backward ------------------------------------

static void play_all(void* context) {
    HtPair* pair = context;
    HtRun *ahead = &pair->runs[0], *back = &pair->runs[1];
    const cudaStream_t stream = pair->env->stream;
    EP_CHECK_NCCL(ht_launch_dispatch(ahead, kForward, stream));
    EP_CHECK_NCCL(ht_launch_dispatch(back, kCached, stream));
    EP_CHECK_NCCL(ht_launch_combine(ahead, false, stream));
    EP_CHECK_NCCL(ht_launch_combine(back, true, stream));
}

// The forward dispatch gets other ids and weights than its handle was made from, too.
static void renew_all(HtPair* pair, uint64_t seed) {
    for (unsigned i = 0; i < kPair; ++i) {
        HtRun* run = &pair->runs[i];
        const RefRouting* routing = run->routing;
        ht_run_give(run, ref_routing_new(routing->num_ranks, routing->num_experts, routing->top_k,
                                         routing->num_tokens, kRefMessy, seed + i));
        ht_prepare(run);
    }
}

static void check_all(HtPair* pair) {
    ep_sync(pair->env);
    for (unsigned i = 0; i < kPair; ++i) ht_check(&pair->runs[i]);
}

static void replay_all(HtPair* pair) {
    renew_all(pair, 50);  // a capture reads no data, but a direct call does
    const EpCaptured captured = ep_capture(pair->env->stream, play_all, pair);
    for (uint64_t i = 0; i < kReplays; ++i) {
        renew_all(pair, 100 + 10 * i);
        ep_replay(&captured);
        check_all(pair);
    }
    renew_all(pair, 200);
    for (unsigned i = 0; i < kLateReplays; ++i) ep_replay(&captured);
    check_all(pair);
    ep_release_captured(&captured);
}

EP_TEST_HT(ht_dispatches_and_combines) {
    HtPair pair = ht_pair_open(env);
    replay_all(&pair);
    ht_pair_close(&pair);
}

EP_TEST_HT(ht_rows_with_scales) {
    HtPair pair = ht_pair_open(env);
    const unsigned hidden = pair.shape.hidden;
    const RefFormat cast = ref_format_cast(ncclBfloat16, hidden, ncclFloat32, 128);
    const RefFormat forward = ref_format_forward(kE4m3, hidden, ncclFloat32, hidden / 128);
    ht_run_set_format(&pair.runs[0], &cast);
    ht_run_set_format(&pair.runs[1], &forward);
    replay_all(&pair);
    ht_pair_close(&pair);
}

// ---- Direct operations, and new handles, between replays ---------------------------------------

static void play_dispatch(void* context) {
    HtRun* run = context;
    EP_CHECK_NCCL(ht_launch_dispatch(run, kForward, run->env->stream));
}

EP_TEST_HT(ht_between_direct_operations) {
    HtPair pair = ht_pair_open(env);
    HtRun *run = &pair.runs[0], *other = &pair.runs[1];
    const EpCaptured captured = ep_capture(env->stream, play_dispatch, run);
    for (uint64_t i = 0; i < kReplays; ++i) {
        ht_prepare_dispatch(run);
        ep_replay(&captured);
        ep_sync(env);
        ht_check_dispatch(run);
        ht_combine(run, i % 2 == 0);
        ht_run_close(other);
        *other = ht_pair_open_run(&pair, 20 + i);
        ht_forward(other);
        if (i % 2 == 1) ht_combine(other, true);
    }
    ep_release_captured(&captured);
    ht_pair_close(&pair);
}

// ---- Low latency -------------------------------------------------------------------------------

static void play_casting(void* context) {
    LlRun* run = context;
    EP_CHECK_NCCL(ll_launch_dispatch(run, run->env->stream, false));
    EP_CHECK_NCCL(ll_launch_combine(run, run->env->stream, false));
}

static void replay_format(LlRun* run, const RefFormat* format) {
    ll_run_set_format(run, format);
    ll_dispatch(run);  // a combine needs a dispatch before it, also at its capture
    ll_prepare(run);
    const EpCaptured captured = ep_capture(run->env->stream, play_casting, run);
    for (unsigned i = 0; i < kReplays; ++i) {
        ll_prepare(run);
        ep_replay(&captured);
        ep_sync(run->env);
        ll_check(run);
    }
    ep_release_captured(&captured);
}

EP_TEST(rows_with_scales) {
    LlPair pair = ll_pair_open(env, kRefMessy);
    const unsigned hidden = pair.shape.hidden;
    const RefFormat cast = ref_format_cast(ncclBfloat16, hidden, ncclFloat32, 128);
    const RefFormat forward = ref_format_forward(kE4m3, hidden, ncclUint8, hidden / 32);
    replay_format(&pair.runs[0], &cast);
    replay_format(&pair.runs[0], &forward);
    ll_pair_close(&pair);
}
