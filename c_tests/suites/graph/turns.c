// Captures and operations of one group that alternate: only the library orders the operations of
// each graph, whatever comes between them.
#include "suites/graph/pairs.h"

enum { kReplays = 3 };

// Makes further work of `to` wait for the present work of `from`.
static void follow(cudaStream_t to, cudaStream_t from, cudaEvent_t event) {
    EP_REQUIRE_CUDA(cudaEventRecord(event, from));
    EP_REQUIRE_CUDA(cudaStreamWaitEvent(to, event, 0));
}

// Two streams are captured at the same time. The dispatch and the combine of the first graph are on
// streams that only the library orders, and an operation of the second comes between them.
EP_TEST(two_captures_in_turns) {
    Pair pair = pair_open(env, false);
    RefRun *run = &pair.runs[0], *other = &pair.runs[1];
    const cudaStream_t second = pair.aside;
    cudaStream_t branch;
    ep_open_streams(&branch, 1);
    cudaEvent_t fork, join;
    EP_REQUIRE_CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    EP_REQUIRE_CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    ref_dispatch(run);  // a combine needs a dispatch before it, also at its capture
    ref_prepare(run);
    ref_prepare_dispatch(other);
    const bool captures = ep_begin_capture(env->stream) && ep_begin_capture(second);
    follow(branch, env->stream, fork);
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, env->stream));
    EP_CHECK_NCCL(ref_launch_dispatch(other, kRefWhole, second));
    EP_CHECK_NCCL(ref_launch_combine(run, kRefWhole, branch));
    follow(env->stream, branch, join);
    if (captures) {
        // A capturing thread may make no graph.
        const cudaGraph_t captured[kPair] = {ep_end_capture(env->stream), ep_end_capture(second)};
        cudaGraphExec_t graphs[kPair] = {ep_instantiate(captured[0]), ep_instantiate(captured[1])};
        for (int i = 0; i < kReplays; ++i) {
            EP_CHECK_CUDA(cudaGraphLaunch(graphs[1], env->stream));
            EP_CHECK_CUDA(cudaGraphLaunch(graphs[0], env->stream));
        }
        ep_sync(env);
        EP_REQUIRE_CUDA(cudaGraphExecDestroy(graphs[1]));
        EP_REQUIRE_CUDA(cudaGraphExecDestroy(graphs[0]));
    }
    EP_CHECK_CUDA(cudaStreamSynchronize(second));
    ref_check(run);
    ref_check_dispatch(other);
    EP_REQUIRE_CUDA(cudaEventDestroy(join));
    EP_REQUIRE_CUDA(cudaEventDestroy(fork));
    ep_close_streams(&branch, 1);
    pair_close(&pair);
}

// A staged operation is captured while an uncaptured one waits for its completion: the captured one
// gets the other slot, so the graph runs beside it.
EP_TEST(captured_beside_a_staged_one) {
    Pair pair = pair_open(env, false);
    RefRun *run = &pair.runs[0], *pending = &pair.runs[1];
    ref_prepare_dispatch(run);
    ref_prepare_dispatch(pending);
    EP_CHECK_NCCL(ref_launch_dispatch(pending, kRefStaged, env->stream));
    const bool captures = ep_begin_capture(env->stream);
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefStaged, env->stream));
    EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, env->stream));
    if (captures) {
        cudaGraphExec_t graph = ep_instantiate(ep_end_capture(env->stream));
        for (int i = 0; i < kReplays; ++i) EP_CHECK_CUDA(cudaGraphLaunch(graph, env->stream));
        ep_sync(env);
        EP_REQUIRE_CUDA(cudaGraphExecDestroy(graph));
    }
    EP_CHECK_NCCL(ncclEpComplete(pending->handle, NULL, env->stream));
    ref_check_dispatch(run);
    ref_check_dispatch(pending);
    pair_close(&pair);
}

// A dispatch is sent in a graph that is never launched, and its handle destroyed. The slot's next operation, outside of
// graphs, first receives what was given up: nothing was sent, so it must not wait for that.
EP_TEST(a_send_that_never_ran) {
    Pair pair = pair_open(env, false);
    RefRun *lost = &pair.runs[0], *run = &pair.runs[1];
    ref_prepare_dispatch(lost);
    if (ep_begin_capture(env->stream)) {
        EP_CHECK_NCCL(ref_launch_dispatch(lost, kRefStaged, env->stream));
        cudaGraph_t graph = NULL;
        // Over several nodes an error: the background's part of the operation has not come back.
        (void)cudaStreamEndCapture(env->stream, &graph);
        (void)cudaGetLastError();
        if (graph != NULL) EP_CHECK_CUDA(cudaGraphDestroy(graph));
        EP_CHECK_NCCL(ep_handle_destroy(&lost->handle));
    }
    for (int i = 0; i < 4; ++i) {  // each slot twice
        ref_prepare_dispatch(run);
        EP_CHECK_NCCL(ref_launch_dispatch(run, kRefStaged, env->stream));
        EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, env->stream));
        ref_check_dispatch(run);
    }
    pair_close(&pair);
}
