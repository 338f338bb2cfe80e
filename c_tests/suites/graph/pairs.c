// See pairs.h.
#include "suites/graph/pairs.h"

#include <string.h>

#include "harness/graphs.h"

enum { kTokens = 16, kTopK = 4, kHidden = 256 };

void ll_pair_open(LlPair* pair, EpEnv* env, RefStyle style) {
    memset(pair, 0, sizeof(*pair));
    const RefShape shape = {2 * (unsigned)env->size, kTokens, kTopK, ncclBfloat16, kHidden};
    pair->env = env;
    pair->shape = shape;
    pair->group = ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, &shape);
    for (unsigned i = 0; i < kPair; ++i) {
        pair->runs[i] = ll_run_open_with(env, pair->group, &shape, style, true, 1 + i);
    }
    ep_open_streams(&pair->aside, 1);
}

void ll_pair_open_ready(LlPair* pair, EpEnv* env) {
    ll_pair_open(pair, env, kRefDistinct);
    for (unsigned i = 0; i < kPair; ++i) {
        ll_dispatch(&pair->runs[i]);
        ll_prepare(&pair->runs[i]);
    }
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

void ht_pair_open_run(HtPair* pair, HtRun* run, uint64_t seed) {
    const HtOpening opening = {kHtRowsExact, kHtNoCounter, seed};
    *run = ht_run_open_with(pair->env, pair->group, &pair->shape, kRefMessy, true, opening);
}

void ht_pair_open(HtPair* pair, EpEnv* env) {
    memset(pair, 0, sizeof(*pair));
    const RefShape shape = {2 * (unsigned)env->size, kTokens, kTopK, ncclBfloat16, kHidden};
    pair->env = env;
    pair->shape = shape;
    pair->group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape);
    for (unsigned i = 0; i < kPair; ++i) ht_pair_open_run(pair, &pair->runs[i], 1 + i);
    ep_open_streams(&pair->aside, 1);
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
