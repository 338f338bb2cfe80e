// Staged operations of one group, captured and not, which take turns in its two slots.
#define _DEFAULT_SOURCE  // usleep
#include <unistd.h>

#include "suites/graph/pairs.h"

enum { kReplays = 3, kLateMicroseconds = 30000 };

// Both phases.
static void dispatch_staged(RefRun* run, cudaStream_t stream) {
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefStaged, stream));
    EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, stream));
}

// Of a capture whose graph nobody launches.
static void forget_capture(cudaStream_t stream) {
    cudaGraph_t graph = NULL;
    // Over several nodes an error if a phase is missing: the background's part of the operation has not come back.
    (void)cudaStreamEndCapture(stream, &graph);
    (void)cudaGetLastError();
    if (graph != NULL) EP_CHECK_CUDA(cudaGraphDestroy(graph));
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
    dispatch_staged(run, env->stream);
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
        forget_capture(env->stream);
        EP_CHECK_NCCL(ep_handle_destroy(&lost->handle));
    }
    for (int i = 0; i < 4; ++i) {  // each slot twice
        ref_prepare_dispatch(run);
        dispatch_staged(run, env->stream);
        ref_check_dispatch(run);
    }
    pair_close(&pair);
}

// A pair of handles, and streams for what goes on beside the first one's late receive phase.
typedef struct {
    Pair pair;
    cudaStream_t captured, next;
    EpGate gate;
} Late;

static Late late_open(EpEnv* env) {
    Late late = {.pair = pair_open(env, false)};
    ep_open_streams(&late.captured, 1);
    ep_open_streams(&late.next, 1);
    return late;
}

static void late_close(Late* late) {
    ep_close_streams(&late->captured, 1);
    ep_close_streams(&late->next, 1);
    pair_close(&late->pair);
}

// A dispatch of the first handle, whose receive phase is held up until end_late.
static void dispatch_late(Late* late) {
    RefRun* run = &late->pair.runs[0];
    ref_prepare_dispatch(run);
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefStaged, run->env->stream));
    EP_CHECK_CUDA(cudaStreamSynchronize(run->env->stream));
    ep_gate_close(&late->gate, late->pair.aside);
    EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, late->pair.aside));
}

static void end_late(Late* late) {
    usleep(kLateMicroseconds);
    ep_gate_open(&late->gate);
    EP_CHECK_CUDA(cudaDeviceSynchronize());
}

// The handle's next operation waits for the late receive phase, although a later one was captured.
EP_TEST_WITH(EP_TEST, a_late_receive_phase_beside_a_capture, Late, late, late_open, late_close) {
    RefRun* run = &late->pair.runs[0];
    dispatch_late(late);
    if (ep_begin_capture(late->captured)) {
        dispatch_staged(run, late->captured);
        forget_capture(late->captured);
    }
    ref_run_change(run, kRefReplace);
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, late->next));
    end_late(late);
    ref_combine(run);
}

// A send that never ran is received before its slot's next operation, but after the slot's receive phase that is late.
EP_TEST_WITH(EP_TEST, a_late_receive_phase_beside_a_send_that_never_ran, Late, late, late_open, late_close) {
    RefRun* run = &late->pair.runs[1];
    RefRun lost = pair_open_run(&late->pair, 77);
    ref_prepare_dispatch(&lost);
    ref_prepare_dispatch(run);
    dispatch_late(late);
    if (ep_begin_capture(late->captured)) {
        dispatch_staged(run, late->captured);
        EP_CHECK_NCCL(ref_launch_dispatch(&lost, kRefStaged, late->captured));
        forget_capture(late->captured);
    }
    EP_CHECK_NCCL(ep_handle_destroy(&lost.handle));
    dispatch_staged(run, env->stream);
    EP_CHECK_CUDA(cudaStreamSynchronize(env->stream));
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefStaged, late->next));  // in the slot of both
    end_late(late);
    EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, late->next));
    EP_CHECK_CUDA(cudaStreamSynchronize(late->next));
    ref_check_dispatch(run);
    ref_check_dispatch(&late->pair.runs[0]);
    ref_run_close(&lost);
}
