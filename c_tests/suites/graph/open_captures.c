// While a capture is open, other streams go on: with captures of their own, as many as may be open, with operations
// outside of graphs, with new handles. Over several nodes the library captures streams of its own, too, which such work
// must not meet.
#include "harness/graphs.h"
#include "harness/nodes.h"
#include "suites/graph/pairs.h"

enum { kReplays = 3, kMostCaptures = 4 };

static const HtPass kForward = {.forward = true};

// ---- High throughput ---------------------------------------------------------------------------

static void replay_ht(HtRun* run, cudaGraphExec_t graph) {
    for (unsigned i = 0; i < kReplays; ++i) {
        ht_prepare(run);
        EP_CHECK_CUDA(cudaGraphLaunch(graph, run->env->stream));
        ep_sync(run->env);
        ht_check(run);
    }
}

EP_TEST_HT(ht_two_open_captures) {
    HtPair pair = ht_pair_open(env);
    HtRun *run = &pair.runs[0], *other = &pair.runs[1];
    if (ep_begin_capture(env->stream) && ep_begin_capture(pair.aside)) {
        EP_CHECK_NCCL(ht_launch_dispatch(run, kForward, env->stream));
        EP_CHECK_NCCL(ht_launch_dispatch(other, kForward, pair.aside));
        EP_CHECK_NCCL(ht_launch_combine(run, false, env->stream));
        EP_CHECK_NCCL(ht_launch_combine(other, true, pair.aside));
        cudaGraphExec_t graphs[kPair];
        end_both_captures(env->stream, pair.aside, graphs);
        for (unsigned i = kPair; i-- > 0;) {
            replay_ht(&pair.runs[i], graphs[i]);
            EP_REQUIRE_CUDA(cudaGraphExecDestroy(graphs[i]));
        }
    }
    ht_pair_close(&pair);
}

EP_TEST_HT(ht_beside_an_open_capture) {
    HtPair pair = ht_pair_open(env);
    HtRun *run = &pair.runs[0], *other = &pair.runs[1];
    ht_prepare(other);
    if (ep_begin_capture(pair.aside)) {
        EP_CHECK_NCCL(ht_launch_dispatch(run, kForward, pair.aside));
        EP_CHECK_NCCL(ht_launch_dispatch(other, kForward, env->stream));
        EP_CHECK_NCCL(ht_launch_combine(other, true, env->stream));
        EP_CHECK_NCCL(ht_launch_combine(run, false, pair.aside));
        cudaGraphExec_t graph = ep_instantiate(ep_end_capture(pair.aside));
        ep_sync(env);
        ht_check(other);
        replay_ht(run, graph);
        EP_REQUIRE_CUDA(cudaGraphExecDestroy(graph));
    }
    ht_pair_close(&pair);
}

// ---- Staged operations -------------------------------------------------------------------------

static void complete(LlRun* run, cudaStream_t stream) { EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, stream)); }

static void replay_ll(LlRun* run, cudaGraphExec_t graph) {
    for (unsigned i = 0; i < kReplays; ++i) ll_run_replay(run, graph);
}

EP_TEST(two_open_captures) {
    LlPair pair = ll_pair_open_ready(env);
    LlRun *run = &pair.runs[0], *other = &pair.runs[1];
    if (ep_begin_capture(env->stream) && ep_begin_capture(pair.aside)) {
        EP_CHECK_NCCL(ll_launch_dispatch(run, env->stream, true));
        EP_CHECK_NCCL(ll_launch_dispatch(other, pair.aside, true));
        complete(run, env->stream);
        complete(other, pair.aside);
        EP_CHECK_NCCL(ll_launch_combine(other, pair.aside, true));
        EP_CHECK_NCCL(ll_launch_combine(run, env->stream, true));
        complete(run, env->stream);
        complete(other, pair.aside);
        cudaGraphExec_t graphs[kPair];
        end_both_captures(env->stream, pair.aside, graphs);
        for (unsigned i = kPair; i-- > 0;) {
            replay_ll(&pair.runs[i], graphs[i]);
            EP_REQUIRE_CUDA(cudaGraphExecDestroy(graphs[i]));
        }
    }
    ll_pair_close(&pair);
}

// What a new handle needs to allocate is no part of the capture.
static void use_new_handle(LlPair* pair) {
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    EP_REQUIRE_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
    LlRun run = ll_run_open_with(pair->env, pair->group, &pair->shape, kRefMessy, true, 7);
    ll_dispatch(&run);
    ll_combine(&run);
    ll_run_close(&run);
    EP_REQUIRE_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
}

// A staged operation outside of the graph, and a handle that is made, used and destroyed there.
EP_TEST(beside_an_open_capture) {
    LlPair pair = ll_pair_open_ready(env);
    LlRun *run = &pair.runs[0], *other = &pair.runs[1];
    if (ep_begin_capture(pair.aside)) {
        EP_CHECK_NCCL(ll_launch_dispatch(run, pair.aside, true));
        EP_CHECK_NCCL(ll_launch_dispatch(other, env->stream, true));
        complete(other, env->stream);
        EP_CHECK_NCCL(ll_launch_combine(other, env->stream, true));
        complete(other, env->stream);
        use_new_handle(&pair);
        complete(run, pair.aside);
        EP_CHECK_NCCL(ll_launch_combine(run, pair.aside, true));
        complete(run, pair.aside);
        cudaGraphExec_t graph = ep_instantiate(ep_end_capture(pair.aside));
        ll_check(other);
        replay_ll(run, graph);
        EP_REQUIRE_CUDA(cudaGraphExecDestroy(graph));
    }
    ll_pair_close(&pair);
}

// Over several nodes a staged operation in one more capture is refused, and no part of it stays: its graph does
// nothing, and the captures before go on.
EP_TEST(one_open_capture_too_many) {
    enum { kAll = kMostCaptures + 1 };
    if (ep_num_nodes() == 1) return;
    LlPair pair = ll_pair_open_ready(env);
    LlRun* run = &pair.runs[0];
    cudaStream_t streams[kAll];
    ep_open_streams(streams, kAll);
    bool captures = true;
    for (unsigned i = 0; i < kAll && captures; ++i) captures = ep_begin_capture(streams[i]);
    if (captures) {
        for (unsigned i = 0; i < kMostCaptures; ++i) {
            EP_CHECK_NCCL(ll_launch_dispatch(run, streams[i], true));
            complete(run, streams[i]);
        }
        EP_CHECK_RESULT(ll_launch_dispatch(run, streams[kMostCaptures], true), ncclInvalidUsage);
        EP_CHECK_STR_CONTAINS(ep_last_error(), "at most 4 captures");
        EP_CHECK_NCCL(ll_launch_combine(run, streams[0], true));
        complete(run, streams[0]);
        cudaGraph_t captured[kAll];
        for (unsigned i = 0; i < kAll; ++i) captured[i] = ep_end_capture(streams[i]);
        cudaGraphExec_t graphs[kAll];
        for (unsigned i = 0; i < kAll; ++i) graphs[i] = ep_instantiate(captured[i]);
        for (unsigned i = 0; i < kReplays; ++i) {
            EP_CHECK_CUDA(cudaGraphLaunch(graphs[kMostCaptures], env->stream));
            replay_ll(run, graphs[0]);
        }
        for (unsigned i = 0; i < kAll; ++i) EP_REQUIRE_CUDA(cudaGraphExecDestroy(graphs[i]));
    }
    ep_close_streams(streams, kAll);
    ll_pair_close(&pair);
}
