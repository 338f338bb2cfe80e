// See pairs.h.
#include "suites/graph/pairs.h"

enum { kTokens = 16, kTopK = 4, kHidden = 256, kReplays = 3 };

static RefOpening opening_of(bool ht, uint64_t seed) {
    return ht ? ref_ht_as(kHtRowsExact, kHtNoCounter, seed) : ref_ll(seed);
}

RefRun pair_open_run(const Pair* pair, uint64_t seed) {
    const RefRun* first = &pair->runs[0];
    return ref_run_open_with(first->env, first->group, &first->shape, kRefMessy, true, opening_of(first->ht, seed));
}

Pair pair_open(EpEnv* env, bool ht) {
    const RefShape shape = {2 * (unsigned)env->size, kTokens, kTopK, ncclBfloat16, kHidden};
    Pair pair;
    ref_runs_open(pair.runs, kPair, env, &shape, kRefMessy, true, opening_of(ht, 1));
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
}

void replay_pair(RefRun* run, cudaGraphExec_t graph) {
    for (unsigned i = 0; i < kReplays; ++i) {
        ref_prepare(run);
        EP_CHECK_CUDA(cudaGraphLaunch(graph, run->env->stream));
        ref_check(run);
    }
    EP_REQUIRE_CUDA(cudaGraphExecDestroy(graph));
}
