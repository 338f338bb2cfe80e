// Staged operations of one group, captured and not, which take turns in its two slots.
#include "suites/graph/pairs.h"

enum { kReplays = 3 };

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
