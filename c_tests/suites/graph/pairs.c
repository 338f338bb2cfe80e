// See pairs.h.
#include "suites/graph/pairs.h"

#include "harness/graphs.h"

enum { kTokens = 16, kTopK = 4, kHidden = 256 };

static RefShape shape_for(const EpEnv* env) {
    return (RefShape){2 * (unsigned)env->size, kTokens, kTopK, ncclBfloat16, kHidden};
}

LlPair ll_pair_open(EpEnv* env, RefStyle style) {
    LlPair pair = {.env = env, .shape = shape_for(env)};
    pair.group = ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, &pair.shape);
    for (unsigned i = 0; i < kPair; ++i) {
        pair.runs[i] = ll_run_open_with(env, pair.group, &pair.shape, style, true, 1 + i);
    }
    ep_open_streams(&pair.aside, 1);
    return pair;
}

LlPair ll_pair_open_ready(EpEnv* env) {
    LlPair pair = ll_pair_open(env, kRefDistinct);
    for (unsigned i = 0; i < kPair; ++i) {
        ll_dispatch(&pair.runs[i]);
        ll_prepare(&pair.runs[i]);
    }
    return pair;
}

void ll_pair_close(LlPair* pair) {
    ep_close_streams(&pair->aside, 1);
    for (unsigned i = 0; i < kPair; ++i) ll_run_close(&pair->runs[i]);
    EP_CHECK_NCCL(ncclEpGroupDestroy(pair->group, pair->env->stream));
}

void ll_run_replay(LlRun* run, cudaGraphExec_t graph) {
    ll_prepare(run);
    EP_CHECK_CUDA(cudaGraphLaunch(graph, run->env->stream));
    ep_sync(run->env);
    ll_check(run);
}

HtRun ht_pair_open_run(const HtPair* pair, uint64_t seed) {
    const HtOpening opening = {kHtRowsExact, kHtNoCounter, seed};
    return ht_run_open_with(pair->env, pair->group, &pair->shape, kRefMessy, true, opening);
}

HtPair ht_pair_open(EpEnv* env) {
    HtPair pair = {.env = env, .shape = shape_for(env)};
    pair.group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &pair.shape);
    for (unsigned i = 0; i < kPair; ++i) pair.runs[i] = ht_pair_open_run(&pair, 1 + i);
    ep_open_streams(&pair.aside, 1);
    return pair;
}

void ht_pair_close(HtPair* pair) {
    ep_close_streams(&pair->aside, 1);
    for (unsigned i = 0; i < kPair; ++i) ht_run_close(&pair->runs[i]);
    EP_CHECK_NCCL(ncclEpGroupDestroy(pair->group, pair->env->stream));
}

void end_both_captures(cudaStream_t first, cudaStream_t second, cudaGraphExec_t graphs[kPair]) {
    const cudaGraph_t captured[kPair] = {ep_end_capture(first), ep_end_capture(second)};
    for (unsigned i = 0; i < kPair; ++i) graphs[i] = ep_instantiate(captured[i]);
}
