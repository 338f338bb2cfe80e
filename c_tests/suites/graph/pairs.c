// See pairs.h.
#include "suites/graph/pairs.h"

enum { kTokens = 16, kTopK = 4, kHidden = 256, kReplays = 3 };

RefRun pair_open_run(const Pair* pair, uint64_t seed) {
    const RefOpening opening = pair->ht ? ref_ht_as(kHtRowsExact, kHtNoCounter, seed) : ref_ll(seed);
    return ref_run_open_with(pair->env, pair->group, &pair->shape, kRefMessy, true, opening);
}

Pair pair_open(EpEnv* env, bool ht) {
    Pair pair = {.env = env, .ht = ht};
    pair.shape = (RefShape){2 * (unsigned)env->size, kTokens, kTopK, ncclBfloat16, kHidden};
    pair.group = ref_group_new(env, ht ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY, &pair.shape);
    for (unsigned i = 0; i < kPair; ++i) pair.runs[i] = pair_open_run(&pair, 1 + i);
    ep_open_streams(&pair.aside, 1);
    return pair;
}

Pair pair_open_ready(EpEnv* env, bool ht) {
    Pair pair = pair_open(env, ht);
    for (unsigned i = 0; i < kPair; ++i) {
        ref_dispatch(&pair.runs[i]);
        ref_prepare(&pair.runs[i]);
    }
    return pair;
}

void pair_close(Pair* pair) {
    ep_close_streams(&pair->aside, 1);
    ref_runs_close(pair->runs, kPair);
    if (pair->group != NULL) EP_CHECK_NCCL(ncclEpGroupDestroy(pair->group, pair->env->stream));
}

void play_pair(void* context) {
    RefRun* run = context;
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, run->env->stream));
    EP_CHECK_NCCL(ref_launch_combine(run, kRefWhole, run->env->stream));
}

void replay_pair(RefRun* run, cudaGraphExec_t graph) {
    for (unsigned i = 0; i < kReplays; ++i) {
        ref_prepare(run);
        EP_CHECK_CUDA(cudaGraphLaunch(graph, run->env->stream));
        ep_sync(run->env);
        ref_check(run);
    }
    EP_REQUIRE_CUDA(cudaGraphExecDestroy(graph));
}
