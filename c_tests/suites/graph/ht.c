// High-throughput operations in graphs, and rows with scales in graphs of both modes. The handles'
// routing is fixed; tokens, scales, weights, results and gradients are new in each replay.
#include <string.h>

#include "reference/ht_run.h"
#include "reference/ll_run.h"
#include "harness/graphs.h"
#include "suites/graph/cases.h"

enum { kRuns = 2, kReplays = 4, kLateReplays = 6, kHidden = 256, kMaxTokens = 12, kTopK = 4 };

static const ncclDataType_t kE4m3 = (ncclDataType_t)10;
static const HtPass kForward = {.forward = true};
static const HtPass kCached = {.forward = false};

// ---- A handle that goes forward, and one that goes backward ------------------------------------

typedef struct {
    const EpEnv* env;
    HtShape shape;
    ncclEpGroup_t group;
    HtRun runs[kRuns];
} Fixture;

static void open_run(Fixture* fixture, HtRun* run, uint64_t seed) {
    const HtOpening opening = {kHtRowsExact, kHtNoCounter, seed};
    ht_run_open_with(run, fixture->env, fixture->group, &fixture->shape, kRefMessy, true, opening);
}

static void open_fixture(Fixture* fixture, const EpEnv* env) {
    memset(fixture, 0, sizeof(*fixture));
    const HtShape shape = {2 * (unsigned)env->size, kMaxTokens, kTopK, ncclBfloat16, kHidden};
    fixture->env = env;
    fixture->shape = shape;
    fixture->group = ht_group_new(env, &shape);
    for (unsigned i = 0; i < kRuns; ++i) open_run(fixture, &fixture->runs[i], 1 + i);
}

static void close_fixture(Fixture* fixture) {
    for (unsigned i = 0; i < kRuns; ++i) ht_run_close(&fixture->runs[i]);
    EP_CHECK_NCCL(ncclEpGroupDestroy(fixture->group, fixture->env->stream));
}

static void play_all(void* context) {
    Fixture* fixture = context;
    HtRun *ahead = &fixture->runs[0], *back = &fixture->runs[1];
    const cudaStream_t stream = fixture->env->stream;
    EP_CHECK_NCCL(ht_launch_dispatch(ahead, kForward, stream));
    EP_CHECK_NCCL(ht_launch_dispatch(back, kCached, stream));
    EP_CHECK_NCCL(ht_launch_combine(ahead, false, stream));
    EP_CHECK_NCCL(ht_launch_combine(back, true, stream));
}

// The forward dispatch gets other ids and weights than its handle was made from, too.
static void renew_all(Fixture* fixture, uint64_t seed) {
    for (unsigned i = 0; i < kRuns; ++i) {
        HtRun* run = &fixture->runs[i];
        const RefRouting* routing = run->routing;
        ht_run_give(run, ref_routing_new(routing->num_ranks, routing->num_experts, routing->top_k,
                                         routing->num_tokens, kRefMessy, seed + i));
        ht_prepare_dispatch(run);
        ht_prepare_combine(run);
    }
}

static void check_all(Fixture* fixture) {
    ep_sync(fixture->env);
    for (unsigned i = 0; i < kRuns; ++i) {
        ht_check_dispatch(&fixture->runs[i]);
        ht_check_combine(&fixture->runs[i]);
    }
}

static void replay_all(Fixture* fixture) {
    renew_all(fixture, 50);  // a capture reads no data, but a direct call does
    const EpCaptured captured = ep_capture(fixture->env->stream, play_all, fixture);
    for (uint64_t i = 0; i < kReplays; ++i) {
        renew_all(fixture, 100 + 10 * i);
        ep_replay(&captured);
        check_all(fixture);
    }
    renew_all(fixture, 200);
    for (unsigned i = 0; i < kLateReplays; ++i) ep_replay(&captured);
    check_all(fixture);
    ep_end_captured(&captured);
}

void ht_dispatches_and_combines(EpEnv* env) {
    Fixture fixture;
    open_fixture(&fixture, env);
    replay_all(&fixture);
    close_fixture(&fixture);
}

void ht_rows_with_scales(EpEnv* env) {
    Fixture fixture;
    open_fixture(&fixture, env);
    const RefFormat cast = ref_format_cast(ncclBfloat16, kHidden, ncclFloat32, 128);
    const RefFormat forward = ref_format_forward(kE4m3, kHidden, ncclFloat32, kHidden / 128);
    ht_run_set_format(&fixture.runs[0], &cast);
    ht_run_set_format(&fixture.runs[1], &forward);
    replay_all(&fixture);
    close_fixture(&fixture);
}

// ---- Direct operations, and new handles, between replays ---------------------------------------

static void play_dispatch(void* context) {
    HtRun* run = context;
    EP_CHECK_NCCL(ht_launch_dispatch(run, kForward, run->env->stream));
}

void ht_between_direct_operations(EpEnv* env) {
    Fixture fixture;
    open_fixture(&fixture, env);
    HtRun *run = &fixture.runs[0], *other = &fixture.runs[1];
    const EpCaptured captured = ep_capture(env->stream, play_dispatch, run);
    for (uint64_t i = 0; i < kReplays; ++i) {
        ht_prepare_dispatch(run);
        ep_replay(&captured);
        ep_sync(env);
        ht_check_dispatch(run);
        ht_combine(run, i % 2 == 0);
        ht_run_close(other);
        open_run(&fixture, other, 20 + i);
        ht_forward(other);
        if (i % 2 == 1) ht_combine(other, true);
    }
    ep_end_captured(&captured);
    close_fixture(&fixture);
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
    ll_prepare_dispatch(run);
    ll_prepare_combine(run);
    const EpCaptured captured = ep_capture(run->env->stream, play_casting, run);
    for (unsigned i = 0; i < kReplays; ++i) {
        ll_prepare_dispatch(run);
        ll_prepare_combine(run);
        ep_replay(&captured);
        ep_sync(run->env);
        ll_check_dispatch(run);
        ll_check_combine(run);
    }
    ep_end_captured(&captured);
}

void rows_with_scales(EpEnv* env) {
    const LlShape shape = {2 * (unsigned)env->size, kMaxTokens, kTopK, ncclBfloat16, kHidden};
    ncclEpGroup_t group = ll_group_new(env, &shape);
    LlRun run;
    ll_run_open_with(&run, env, group, &shape, kRefMessy, true, 1);
    const RefFormat cast = ref_format_cast(ncclBfloat16, kHidden, ncclFloat32, 128);
    const RefFormat forward = ref_format_forward(kE4m3, kHidden, ncclUint8, kHidden / 32);
    replay_format(&run, &cast);
    replay_format(&run, &forward);
    ll_run_close(&run);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}
