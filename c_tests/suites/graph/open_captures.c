// While a capture is open, other streams go on: with captures of their own, as many as may be open, with operations
// outside of graphs, with new handles. Over several nodes the library captures streams of its own, too, which such work
// must not meet. Low latency's operations are staged.
#include "harness/nodes.h"
#include "suites/graph/pairs.h"

enum { kReplays = 3, kMostCaptures = 4 };

static void complete(const RefRun* run, cudaStream_t stream) {
    if (!run->ht) EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, stream));
}

static void two_open(EpEnv* env, bool ht) {
    Pair pair = pair_open_ready(env, ht);
    RefRun *run = &pair.runs[0], *other = &pair.runs[1];
    if (ep_begin_capture(env->stream) && ep_begin_capture(pair.aside)) {
        EP_CHECK_NCCL(ref_launch_dispatch(run, kRefStaged, env->stream));
        EP_CHECK_NCCL(ref_launch_dispatch(other, kRefStaged, pair.aside));
        complete(run, env->stream);
        complete(other, pair.aside);
        EP_CHECK_NCCL(ref_launch_combine(other, ht ? kRefBackward : kRefStaged, pair.aside));
        EP_CHECK_NCCL(ref_launch_combine(run, kRefStaged, env->stream));
        complete(run, env->stream);
        complete(other, pair.aside);
        // A capturing thread may make no graph.
        const cudaGraph_t captured[kPair] = {ep_end_capture(env->stream), ep_end_capture(pair.aside)};
        for (unsigned i = kPair; i-- > 0;) replay_pair(&pair.runs[i], ep_instantiate(captured[i]));
    }
    pair_close(&pair);
}
EP_TEST(two_open_captures) { two_open(env, false); }
EP_TEST_HT(ht_two_open_captures) { two_open(env, true); }

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
    Pair pair = pair_open_ready(env, ht);
    RefRun *run = &pair.runs[0], *other = &pair.runs[1];
    if (ep_begin_capture(pair.aside)) {
        EP_CHECK_NCCL(ref_launch_dispatch(run, kRefStaged, pair.aside));
        EP_CHECK_NCCL(ref_launch_dispatch(other, kRefStaged, env->stream));
        complete(other, env->stream);
        EP_CHECK_NCCL(ref_launch_combine(other, ht ? kRefBackward : kRefStaged, env->stream));
        complete(other, env->stream);
        if (!ht) use_new_handle(&pair);
        complete(run, pair.aside);
        EP_CHECK_NCCL(ref_launch_combine(run, kRefStaged, pair.aside));
        complete(run, pair.aside);
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
            complete(run, streams[i]);
        }
        EP_CHECK_RESULT(ref_launch_dispatch(run, kRefStaged, streams[kMostCaptures]), ncclInvalidUsage);
        EP_CHECK_STR_CONTAINS(ep_last_error(), "at most 4 captures");
        EP_CHECK_NCCL(ref_launch_combine(run, kRefStaged, streams[0]));
        complete(run, streams[0]);
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
