// Groups that end before graphs that have their operations. Such a graph is launched no more; the
// groups after it work, while the graph is there and when it is gone. No thread of the library waits
// for the device then: it would wait for a program that waits for it.
#define _GNU_SOURCE  // usleep
#include <unistd.h>

#include "suites/graph/pairs.h"

enum { kGroups = 3, kMeanwhileUs = 30000, kLooksUs = 300000, kStreams = 2 };

// A graph that was launched once.
static cudaGraphExec_t capture(RefRun* run) {
    const cudaStream_t stream = run->env->stream;
    if (!ep_begin_capture(stream)) return NULL;
    ref_play_pair(run);
    cudaGraphExec_t graph = ep_instantiate(ep_end_capture(stream));
    EP_CHECK_CUDA(cudaGraphLaunch(graph, stream));
    ref_check(run);
    return graph;
}

// On a stream that waits for the program, which waits for no other thread.
static void dispatch_behind_a_gate(RefRun* run) {
    EpGate gate;
    ref_prepare_dispatch(run);
    ep_gate_close(&gate, run->env->stream);
    usleep(kMeanwhileUs);
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, run->env->stream));
    ep_gate_open(&gate);
    ref_check_dispatch(run);
}

EP_TEST(groups_end_before_their_graphs) {
    cudaGraphExec_t graphs[kGroups];
    for (unsigned i = 0; i < kGroups; ++i) {
        Pair pair = pair_open_ready(env, false);
        RefRun* run = &pair.runs[0];
        graphs[i] = capture(run);
        // The graph of the group before has outlived it.
        if (i > 0 && graphs[i - 1] != NULL) EP_CHECK_CUDA(cudaGraphExecDestroy(graphs[i - 1]));
        if (i > 0) dispatch_behind_a_gate(run);
        pair_close(&pair);
    }
    if (graphs[kGroups - 1] != NULL) EP_CHECK_CUDA(cudaGraphExecDestroy(graphs[kGroups - 1]));
}

static void close_group(Pair* pair) {
    for (unsigned i = 0; i < kPair; ++i) EP_CHECK_NCCL(ep_handle_destroy(&pair->runs[i].handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(pair->runs[0].own_group, pair->aside));
    pair->runs[0].own_group = NULL;
}

// As another group is busy, the network of the group that has ended cannot be freed yet. Whenever it is, NCCL's own
// threads end a capture that calls of any thread can disturb. So that must not be before the busy group ends.
EP_TEST(a_group_ends_beside_a_capture) {
    if (ep_on_fake_nccl()) {
        ep_skip("the gate is a host function, behind which fake_nccl's all-gathers wait");
        return;
    }
    cudaStream_t streams[kStreams];
    EpGate gate;
    Pair ending = pair_open(env, false);
    Pair busy = pair_open(env, false);
    ep_open_streams(streams, kStreams);
    ref_dispatch(&ending.runs[0]);
    ref_dispatch(&busy.runs[0]);
    ref_prepare_dispatch(&busy.runs[0]);
    ep_sync(env);
    ep_gate_close(&gate, streams[0]);
    EP_CHECK_NCCL(ref_launch_dispatch(&busy.runs[0], kRefWhole, streams[0]));
    close_group(&ending);
    ep_barrier();
    const bool captures = ep_begin_capture_in(streams[1], cudaStreamCaptureModeGlobal);
    ep_gate_open(&gate);
    usleep(kLooksUs);
    if (captures) {
        cudaGraph_t graph = NULL;
        EP_CHECK_CUDA(cudaStreamEndCapture(streams[1], &graph));
        if (graph != NULL) EP_CHECK_CUDA(cudaGraphDestroy(graph));
    }
    EP_CHECK_CUDA(cudaStreamSynchronize(streams[0]));
    ref_check_dispatch(&busy.runs[0]);
    ep_close_streams(streams, kStreams);
    pair_close(&ending);
    pair_close(&busy);
}
