// While a capture is open, other streams go on: with captures of their own, with operations outside of graphs, with
// new handles. Over several nodes the library captures streams of its own, too, which such work must not meet.
#include <string.h>

#include "harness/graphs.h"
#include "reference/ht_run.h"
#include "reference/ll_run.h"
#include "suites/graph/cases.h"

enum { kRuns = 2, kReplays = 3, kHidden = 64, kTokens = 12, kTopK = 4 };

static const HtPass kForward = {.forward = true};

// ---- High throughput ---------------------------------------------------------------------------

typedef struct {
    ncclEpGroup_t group;
    HtRun runs[kRuns];
    cudaStream_t aside;
} HtFixture;

static void open_ht(HtFixture* fixture, EpEnv* env) {
    const HtShape shape = {2 * (unsigned)env->size, kTokens, kTopK, ncclBfloat16, kHidden};
    fixture->group = ht_group_new(env, &shape);
    for (unsigned i = 0; i < kRuns; ++i) {
        const HtOpening opening = {kHtRowsExact, kHtNoCounter, 1 + i};
        ht_run_open_with(&fixture->runs[i], env, fixture->group, &shape, kRefMessy, true, opening);
    }
    ep_open_streams(&fixture->aside, 1);
}

static void close_ht(HtFixture* fixture, const EpEnv* env) {
    ep_close_streams(&fixture->aside, 1);
    for (unsigned i = 0; i < kRuns; ++i) ht_run_close(&fixture->runs[i]);
    EP_CHECK_NCCL(ncclEpGroupDestroy(fixture->group, env->stream));
}

static void prepare_ht(HtRun* run) {
    ht_prepare_dispatch(run);
    ht_prepare_combine(run);
}

static void check_ht(HtRun* run) {
    ht_check_dispatch(run);
    ht_check_combine(run);
}

static void replay_ht(HtRun* run, cudaGraphExec_t graph) {
    for (unsigned i = 0; i < kReplays; ++i) {
        prepare_ht(run);
        EP_CHECK_CUDA(cudaGraphLaunch(graph, run->env->stream));
        ep_sync(run->env);
        check_ht(run);
    }
}

void ht_two_open_captures(EpEnv* env) {
    HtFixture fixture;
    open_ht(&fixture, env);
    HtRun *run = &fixture.runs[0], *other = &fixture.runs[1];
    if (ep_begin_capture(env->stream) && ep_begin_capture(fixture.aside)) {
        EP_CHECK_NCCL(ht_launch_dispatch(run, kForward, env->stream));
        EP_CHECK_NCCL(ht_launch_dispatch(other, kForward, fixture.aside));
        EP_CHECK_NCCL(ht_launch_combine(run, false, env->stream));
        EP_CHECK_NCCL(ht_launch_combine(other, true, fixture.aside));
        const cudaGraph_t captured[2] = {ep_end_capture(env->stream), ep_end_capture(fixture.aside)};
        cudaGraphExec_t graph = ep_instantiate(captured[0]);
        cudaGraphExec_t other_graph = ep_instantiate(captured[1]);
        replay_ht(other, other_graph);
        replay_ht(run, graph);
        EP_REQUIRE_CUDA(cudaGraphExecDestroy(graph));
        EP_REQUIRE_CUDA(cudaGraphExecDestroy(other_graph));
    }
    close_ht(&fixture, env);
}

void ht_beside_an_open_capture(EpEnv* env) {
    HtFixture fixture;
    open_ht(&fixture, env);
    HtRun *run = &fixture.runs[0], *other = &fixture.runs[1];
    prepare_ht(other);
    if (ep_begin_capture(fixture.aside)) {
        EP_CHECK_NCCL(ht_launch_dispatch(run, kForward, fixture.aside));
        EP_CHECK_NCCL(ht_launch_dispatch(other, kForward, env->stream));
        EP_CHECK_NCCL(ht_launch_combine(other, true, env->stream));
        EP_CHECK_NCCL(ht_launch_combine(run, false, fixture.aside));
        cudaGraphExec_t graph = ep_instantiate(ep_end_capture(fixture.aside));
        ep_sync(env);
        check_ht(other);
        replay_ht(run, graph);
        EP_REQUIRE_CUDA(cudaGraphExecDestroy(graph));
    }
    close_ht(&fixture, env);
}

// ---- Staged operations -------------------------------------------------------------------------

typedef struct {
    LlShape shape;
    ncclEpGroup_t group;
    LlRun runs[kRuns];
    cudaStream_t aside;
} LlFixture;

static void open_ll(LlFixture* fixture, EpEnv* env) {
    const LlShape shape = {2 * (unsigned)env->size, kTokens, kTopK, ncclBfloat16, kHidden};
    fixture->shape = shape;
    fixture->group = ll_group_new(env, &shape);
    for (unsigned i = 0; i < kRuns; ++i) {
        LlRun* run = &fixture->runs[i];
        ll_run_open_with(run, env, fixture->group, &shape, kRefDistinct, true, 1 + i);
        ll_dispatch(run);  // a combine needs a dispatch before it, also at its capture
        ll_prepare_dispatch(run);
        ll_prepare_combine(run);
    }
    ep_open_streams(&fixture->aside, 1);
}

static void close_ll(LlFixture* fixture, const EpEnv* env) {
    ep_close_streams(&fixture->aside, 1);
    for (unsigned i = 0; i < kRuns; ++i) ll_run_close(&fixture->runs[i]);
    EP_CHECK_NCCL(ncclEpGroupDestroy(fixture->group, env->stream));
}

static void complete(LlRun* run, cudaStream_t stream) {
    EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, stream));
}

static void check_ll(LlRun* run) {
    ll_check_dispatch(run);
    ll_check_combine(run);
}

static void replay_ll(LlRun* run, cudaGraphExec_t graph) {
    for (unsigned i = 0; i < kReplays; ++i) {
        ll_prepare_dispatch(run);
        ll_prepare_combine(run);
        EP_CHECK_CUDA(cudaGraphLaunch(graph, run->env->stream));
        ep_sync(run->env);
        check_ll(run);
    }
}

void two_open_captures(EpEnv* env) {
    LlFixture fixture;
    open_ll(&fixture, env);
    LlRun *run = &fixture.runs[0], *other = &fixture.runs[1];
    if (ep_begin_capture(env->stream) && ep_begin_capture(fixture.aside)) {
        EP_CHECK_NCCL(ll_launch_dispatch(run, env->stream, true));
        EP_CHECK_NCCL(ll_launch_dispatch(other, fixture.aside, true));
        complete(run, env->stream);
        complete(other, fixture.aside);
        EP_CHECK_NCCL(ll_launch_combine(other, fixture.aside, true));
        EP_CHECK_NCCL(ll_launch_combine(run, env->stream, true));
        complete(run, env->stream);
        complete(other, fixture.aside);
        const cudaGraph_t captured[2] = {ep_end_capture(env->stream), ep_end_capture(fixture.aside)};
        cudaGraphExec_t graph = ep_instantiate(captured[0]);
        cudaGraphExec_t other_graph = ep_instantiate(captured[1]);
        replay_ll(other, other_graph);
        replay_ll(run, graph);
        EP_REQUIRE_CUDA(cudaGraphExecDestroy(graph));
        EP_REQUIRE_CUDA(cudaGraphExecDestroy(other_graph));
    }
    close_ll(&fixture, env);
}

// What a new handle needs to allocate is no part of the capture.
static void use_new_handle(LlFixture* fixture, EpEnv* env) {
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    EP_REQUIRE_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
    LlRun run;
    ll_run_open_with(&run, env, fixture->group, &fixture->shape, kRefMessy, true, 7);
    ll_dispatch(&run);
    ll_combine(&run);
    ll_run_close(&run);
    EP_REQUIRE_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
}

// A staged operation outside of the graph, and a handle that is made, used and destroyed there.
void beside_an_open_capture(EpEnv* env) {
    LlFixture fixture;
    open_ll(&fixture, env);
    LlRun *run = &fixture.runs[0], *other = &fixture.runs[1];
    if (ep_begin_capture(fixture.aside)) {
        EP_CHECK_NCCL(ll_launch_dispatch(run, fixture.aside, true));
        EP_CHECK_NCCL(ll_launch_dispatch(other, env->stream, true));
        complete(other, env->stream);
        EP_CHECK_NCCL(ll_launch_combine(other, env->stream, true));
        complete(other, env->stream);
        use_new_handle(&fixture, env);
        complete(run, fixture.aside);
        EP_CHECK_NCCL(ll_launch_combine(run, fixture.aside, true));
        complete(run, fixture.aside);
        cudaGraphExec_t graph = ep_instantiate(ep_end_capture(fixture.aside));
        check_ll(other);
        replay_ll(run, graph);
        EP_REQUIRE_CUDA(cudaGraphExecDestroy(graph));
    }
    close_ll(&fixture, env);
}
