// While a capture is open, other streams go on: with captures of their own, as many as may be open, with operations
// outside of graphs, with new handles. Over several nodes the library captures streams of its own, too, which such work
// must not meet. Low latency's operations are staged, too.
#include "harness/nodes.h"
#include "suites/graph/pairs.h"

enum { kReplays = 3, kMostCaptures = 4 };

static void complete(const RefRun* run, cudaStream_t stream, RefPass pass) {
    if (pass.send_only) EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, stream));
}

// Makes further work of `to` wait for the present work of `from`.
static void follow(cudaStream_t to, cudaStream_t from) {
    cudaEvent_t event;
    EP_REQUIRE_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    EP_REQUIRE_CUDA(cudaEventRecord(event, from));
    EP_REQUIRE_CUDA(cudaStreamWaitEvent(to, event, 0));
    EP_REQUIRE_CUDA(cudaEventDestroy(event));
}

// The combine of the first graph is on a branch, which only the library orders behind the dispatch, and operations of
// the second come between them.
static void two_open(EpEnv* env, bool ht, RefPass pass) {
    Pair pair = pair_open_ready(env, ht);
    RefRun *run = &pair.runs[0], *other = &pair.runs[1];
    cudaStream_t branch;
    ep_open_streams(&branch, 1);
    if (ep_begin_capture(env->stream) && ep_begin_capture(pair.aside)) {
        follow(branch, env->stream);
        EP_CHECK_NCCL(ref_launch_dispatch(run, pass, env->stream));
        EP_CHECK_NCCL(ref_launch_dispatch(other, pass, pair.aside));
        complete(run, env->stream, pass);
        complete(other, pair.aside, pass);
        EP_CHECK_NCCL(ref_launch_combine(other, ht ? kRefBackward : pass, pair.aside));
        EP_CHECK_NCCL(ref_launch_combine(run, pass, branch));
        complete(run, branch, pass);
        complete(other, pair.aside, pass);
        follow(env->stream, branch);
        // A capturing thread may make no graph.
        const cudaGraph_t captured[kPair] = {ep_end_capture(env->stream), ep_end_capture(pair.aside)};
        for (unsigned i = kPair; i-- > 0;) replay_pair(&pair.runs[i], ep_instantiate(captured[i]));
    }
    ep_close_streams(&branch, 1);
    pair_close(&pair);
}
EP_TEST(two_open_captures) {
    two_open(env, false, kRefWhole);
    two_open(env, false, kRefStaged);
}
EP_TEST_HT(ht_two_open_captures) { two_open(env, true, kRefWhole); }

// What a new handle needs to allocate is no part of the capture.
static void use_new_handle(Pair* pair) {
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    EP_REQUIRE_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
    RefRun run = pair_open_run(pair, 7);
    ref_pair(&run);
    ref_run_close(&run);
    EP_REQUIRE_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
}

// An operation outside of the graph, and in low latency a handle that is made, used and destroyed there.
static void beside_an_open_one(EpEnv* env, bool ht) {
    const RefPass pass = ht ? kRefWhole : kRefStaged;
    Pair pair = pair_open_ready(env, ht);
    RefRun *run = &pair.runs[0], *other = &pair.runs[1];
    if (ep_begin_capture(pair.aside)) {
        EP_CHECK_NCCL(ref_launch_dispatch(run, pass, pair.aside));
        EP_CHECK_NCCL(ref_launch_dispatch(other, pass, env->stream));
        complete(other, env->stream, pass);
        EP_CHECK_NCCL(ref_launch_combine(other, ht ? kRefBackward : pass, env->stream));
        complete(other, env->stream, pass);
        if (!ht) use_new_handle(&pair);
        complete(run, pair.aside, pass);
        EP_CHECK_NCCL(ref_launch_combine(run, pass, pair.aside));
        complete(run, pair.aside, pass);
        cudaGraphExec_t graph = ep_instantiate(ep_end_capture(pair.aside));
        ref_check(other);
        replay_pair(run, graph);
    }
    pair_close(&pair);
}
EP_TEST(beside_an_open_capture) { beside_an_open_one(env, false); }
EP_TEST_HT(ht_beside_an_open_capture) { beside_an_open_one(env, true); }

// Over several nodes a staged operation in one more capture is refused, and no part of it stays: its graph does
// nothing, and the captures before go on.
EP_TEST(one_open_capture_too_many) {
    enum { kAll = kMostCaptures + 1 };
    if (ep_num_nodes() == 1) return;
    Pair pair = pair_open_ready(env, false);
    RefRun* run = &pair.runs[0];
    cudaStream_t streams[kAll];
    ep_open_streams(streams, kAll);
    bool captures = true;
    for (unsigned i = 0; i < kAll && captures; ++i) captures = ep_begin_capture(streams[i]);
    if (captures) {
        for (unsigned i = 0; i < kMostCaptures; ++i) {
            EP_CHECK_NCCL(ref_launch_dispatch(run, kRefStaged, streams[i]));
            complete(run, streams[i], kRefStaged);
        }
        EP_CHECK_RESULT(ref_launch_dispatch(run, kRefStaged, streams[kMostCaptures]), ncclInvalidUsage);
        EP_CHECK_STR_CONTAINS(ep_last_error(), "at most 4 captures");
        EP_CHECK_NCCL(ref_launch_combine(run, kRefStaged, streams[0]));
        complete(run, streams[0], kRefStaged);
        cudaGraph_t captured[kAll];
        for (unsigned i = 0; i < kAll; ++i) captured[i] = ep_end_capture(streams[i]);
        cudaGraphExec_t graphs[kAll];
        for (unsigned i = 0; i < kAll; ++i) graphs[i] = ep_instantiate(captured[i]);
        for (unsigned i = 0; i < kReplays; ++i) EP_CHECK_CUDA(cudaGraphLaunch(graphs[kMostCaptures], env->stream));
        replay_pair(run, graphs[0]);
        for (unsigned i = 1; i < kAll; ++i) EP_REQUIRE_CUDA(cudaGraphExecDestroy(graphs[i]));
    }
    ep_close_streams(streams, kAll);
    pair_close(&pair);
}
