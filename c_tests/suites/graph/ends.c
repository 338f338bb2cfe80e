// Groups that end before graphs that have their operations. Such a graph is launched no more; the
// groups after it work, while the graph is there and when it is gone. No thread of the library waits
// for the device then: it would wait for a program that waits for it.
#define _GNU_SOURCE  // usleep
#include <stdatomic.h>
#include <unistd.h>

#include "harness/graphs.h"
#include "suites/graph/cases.h"
#include "suites/graph/pairs.h"

enum { kGroups = 3, kPauseUs = 100, kMeanwhileUs = 30000 };

static cudaGraphExec_t capture(LlRun* run, cudaStream_t stream) {
    if (!ep_begin_capture(stream)) return NULL;
    EP_CHECK_NCCL(ll_launch_dispatch(run, stream, false));
    EP_CHECK_NCCL(ll_launch_combine(run, stream, false));
    return ep_instantiate(ep_end_capture(stream));
}

static void replay(LlRun* run, cudaGraphExec_t graph) {
    ll_prepare_dispatch(run);
    ll_prepare_combine(run);
    EP_CHECK_CUDA(cudaGraphLaunch(graph, run->env->stream));
    ep_sync(run->env);
    ll_check_dispatch(run);
    ll_check_combine(run);
}

static void wait_for(void* is_open) {
    while (!atomic_load((atomic_bool*)is_open)) usleep(kPauseUs);
}

// On a stream that waits for the program, which waits for no other thread.
static void dispatch_behind_a_gate(LlRun* run) {
    atomic_bool is_open = false;
    ll_prepare_dispatch(run);
    EP_REQUIRE_CUDA(cudaLaunchHostFunc(run->env->stream, wait_for, &is_open));
    usleep(kMeanwhileUs);
    EP_CHECK_NCCL(ll_launch_dispatch(run, run->env->stream, false));
    atomic_store(&is_open, true);
    ep_sync(run->env);
    ll_check_dispatch(run);
}

void groups_end_before_their_graphs(EpEnv* env) {
    cudaGraphExec_t graphs[kGroups];
    for (unsigned i = 0; i < kGroups; ++i) {
        LlPair pair;
        ll_pair_open(&pair, env, kRefDistinct);
        LlRun* run = &pair.runs[0];
        ll_dispatch(run);  // a combine needs a dispatch before it, also at its capture
        ll_prepare_dispatch(run);
        ll_prepare_combine(run);
        graphs[i] = capture(run, env->stream);
        if (graphs[i] != NULL) replay(run, graphs[i]);
        // The graph of the group before has outlived it.
        if (i > 0 && graphs[i - 1] != NULL) EP_CHECK_CUDA(cudaGraphExecDestroy(graphs[i - 1]));
        if (i > 0) dispatch_behind_a_gate(run);
        ll_pair_close(&pair);
    }
    if (graphs[kGroups - 1] != NULL) EP_CHECK_CUDA(cudaGraphExecDestroy(graphs[kGroups - 1]));
}
