// Captures and operations of one group that alternate: only the library orders the operations of
// each graph, whatever comes between them.
#include "reference/ll_run.h"
#include "harness/graphs.h"
#include "suites/graph/cases.h"

enum { kHidden = 64, kRuns = 2, kReplays = 3 };

typedef struct {
    const EpEnv* env;
    ncclEpGroup_t group;
    LlRun runs[kRuns];
} Fixture;

static void open_fixture(Fixture* fixture, const EpEnv* env) {
    const LlShape shape = {2 * (unsigned)env->size, 16, 4, ncclBfloat16, kHidden};
    fixture->env = env;
    fixture->group = ll_group_new(env, &shape);
    for (unsigned i = 0; i < kRuns; ++i) {
        ll_run_open_with(&fixture->runs[i], env, fixture->group, &shape, kRefDistinct, true, 1 + i);
    }
}

static void close_fixture(Fixture* fixture) {
    for (unsigned i = 0; i < kRuns; ++i) ll_run_close(&fixture->runs[i]);
    EP_CHECK_NCCL(ncclEpGroupDestroy(fixture->group, fixture->env->stream));
}

// Makes further work of `to` wait for the present work of `from`.
static void follow(cudaStream_t to, cudaStream_t from, cudaEvent_t event) {
    EP_REQUIRE_CUDA(cudaEventRecord(event, from));
    EP_REQUIRE_CUDA(cudaStreamWaitEvent(to, event, 0));
}

// Two streams are captured at the same time. The dispatch and the combine of the first graph are on
// streams that only the library orders, and an operation of the second comes between them.
void two_captures_in_turns(EpEnv* env) {
    Fixture fixture;
    open_fixture(&fixture, env);
    LlRun *run = &fixture.runs[0], *other = &fixture.runs[1];
    cudaStream_t streams[2];
    ep_open_streams(streams, 2);
    const cudaStream_t branch = streams[0], second = streams[1];
    cudaEvent_t fork, join;
    EP_REQUIRE_CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    EP_REQUIRE_CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    ll_dispatch(run);  // a combine needs a dispatch before it, also at its capture
    ll_prepare_dispatch(run);
    ll_prepare_combine(run);
    ll_prepare_dispatch(other);
    const bool captures = ep_begin_capture(env->stream) && ep_begin_capture(second);
    follow(branch, env->stream, fork);
    EP_CHECK_NCCL(ll_launch_dispatch(run, env->stream, false));
    EP_CHECK_NCCL(ll_launch_dispatch(other, second, false));
    EP_CHECK_NCCL(ll_launch_combine(run, branch, false));
    follow(env->stream, branch, join);
    if (captures) {
        const cudaGraph_t captured[2] = {ep_end_capture(env->stream), ep_end_capture(second)};
        cudaGraphExec_t first_graph = ep_instantiate(captured[0]);
        cudaGraphExec_t second_graph = ep_instantiate(captured[1]);
        for (int i = 0; i < kReplays; ++i) {
            EP_CHECK_CUDA(cudaGraphLaunch(second_graph, env->stream));
            EP_CHECK_CUDA(cudaGraphLaunch(first_graph, env->stream));
        }
        ep_sync(env);
        EP_REQUIRE_CUDA(cudaGraphExecDestroy(second_graph));
        EP_REQUIRE_CUDA(cudaGraphExecDestroy(first_graph));
    }
    EP_CHECK_CUDA(cudaStreamSynchronize(second));
    ep_sync(env);
    ll_check_dispatch(run);
    ll_check_combine(run);
    ll_check_dispatch(other);
    EP_REQUIRE_CUDA(cudaEventDestroy(join));
    EP_REQUIRE_CUDA(cudaEventDestroy(fork));
    ep_close_streams(streams, 2);
    close_fixture(&fixture);
}

// A staged operation is captured while an uncaptured one waits for its completion: the captured one
// gets the other slot, so the graph runs beside it.
void captured_beside_a_staged_one(EpEnv* env) {
    Fixture fixture;
    open_fixture(&fixture, env);
    LlRun *run = &fixture.runs[0], *pending = &fixture.runs[1];
    ll_prepare_dispatch(run);
    ll_prepare_dispatch(pending);
    EP_CHECK_NCCL(ll_launch_dispatch(pending, env->stream, true));
    const bool captures = ep_begin_capture(env->stream);
    EP_CHECK_NCCL(ll_launch_dispatch(run, env->stream, true));
    EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, env->stream));
    if (captures) {
        cudaGraphExec_t graph = ep_instantiate(ep_end_capture(env->stream));
        for (int i = 0; i < kReplays; ++i) EP_CHECK_CUDA(cudaGraphLaunch(graph, env->stream));
        ep_sync(env);
        EP_REQUIRE_CUDA(cudaGraphExecDestroy(graph));
    }
    EP_CHECK_NCCL(ncclEpComplete(pending->handle, NULL, env->stream));
    ep_sync(env);
    ll_check_dispatch(run);
    ll_check_dispatch(pending);
    close_fixture(&fixture);
}
