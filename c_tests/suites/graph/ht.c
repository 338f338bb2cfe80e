// High-throughput operations in graphs, and rows with scales in graphs of both modes. The handles'
// routing is fixed; tokens, scales, weights, results and gradients are new in each replay.
#include "suites/graph/pairs.h"

enum { kReplays = 4, kLateReplays = 6 };

static const ncclDataType_t kE4m3 = (ncclDataType_t)10;

// ---- A handle that goes forward, and one that goes backward ------------------------------------

static void play_all(void* context) {
    Pair* pair = context;
    RefRun *ahead = &pair->runs[0], *back = &pair->runs[1];
    const cudaStream_t stream = pair->env->stream;
    EP_CHECK_NCCL(ref_launch_dispatch(ahead, kRefWhole, stream));
    EP_CHECK_NCCL(ref_launch_dispatch(back, kRefCached, stream));
    EP_CHECK_NCCL(ref_launch_combine(ahead, kRefWhole, stream));
    EP_CHECK_NCCL(ref_launch_combine(back, kRefBackward, stream));
}

// The forward dispatch gets other ids and weights than its handle was made from, too.
static void renew_all(Pair* pair, uint64_t seed) {
    for (unsigned i = 0; i < kPair; ++i) {
        RefRun* run = &pair->runs[i];
        ref_run_draw(run, kRefMessy, seed + i);
        ref_prepare(run);
    }
}

static void check_all(Pair* pair) {
    ep_sync(pair->env);
    for (unsigned i = 0; i < kPair; ++i) ref_check(&pair->runs[i]);
}

static void replay_all(Pair* pair) {
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
    Pair pair = pair_open(env, true);
    replay_all(&pair);
    pair_close(&pair);
}

EP_TEST_HT(ht_rows_with_scales) {
    Pair pair = pair_open(env, true);
    const unsigned hidden = pair.shape.hidden;
    const RefFormat cast = ref_format_cast(ncclBfloat16, hidden, ncclFloat32, 128);
    const RefFormat forward = ref_format_forward(kE4m3, hidden, ncclFloat32, hidden / 128);
    ref_run_set_format(&pair.runs[0], &cast);
    ref_run_set_format(&pair.runs[1], &forward);
    replay_all(&pair);
    pair_close(&pair);
}

// ---- Direct operations, and new handles, between replays ---------------------------------------

static void play_dispatch(void* context) {
    RefRun* run = context;
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, run->env->stream));
}

EP_TEST_HT(ht_between_direct_operations) {
    Pair pair = pair_open(env, true);
    RefRun *run = &pair.runs[0], *other = &pair.runs[1];
    const EpCaptured captured = ep_capture(env->stream, play_dispatch, run);
    for (uint64_t i = 0; i < kReplays; ++i) {
        ref_prepare_dispatch(run);
        ep_replay(&captured);
        ep_sync(env);
        ref_check_dispatch(run);
        ref_combine_as(run, i % 2 == 0 ? kRefBackward : kRefWhole);
        ref_run_close(other);
        *other = pair_open_run(&pair, 20 + i);
        ref_dispatch(other);
        if (i % 2 == 1) ref_combine_as(other, kRefBackward);
    }
    ep_release_captured(&captured);
    pair_close(&pair);
}

// ---- Low latency -------------------------------------------------------------------------------

static void replay_format(RefRun* run, const RefFormat* format) {
    ref_run_set_format(run, format);
    ref_dispatch(run);  // a combine needs a dispatch before it, also at its capture
    ref_prepare(run);
    const EpCaptured captured = ep_capture(run->env->stream, play_pair, run);
    for (unsigned i = 0; i < kReplays; ++i) {
        ref_prepare(run);
        ep_replay(&captured);
        ep_sync(run->env);
        ref_check(run);
    }
    ep_release_captured(&captured);
}

EP_TEST(rows_with_scales) {
    Pair pair = pair_open(env, false);
    const unsigned hidden = pair.shape.hidden;
    const RefFormat cast = ref_format_cast(ncclBfloat16, hidden, ncclFloat32, 128);
    const RefFormat forward = ref_format_forward(kE4m3, hidden, ncclUint8, hidden / 32);
    replay_format(&pair.runs[0], &cast);
    replay_format(&pair.runs[0], &forward);
    pair_close(&pair);
}
