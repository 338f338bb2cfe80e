// Invariant sums: the bits of a combined token do not depend on the rank that is its home, nor on that rank's node.
#include "reference/homes.h"

#include "reference/ll_run.h"

enum { kTokens = 4, kHidden = 64, kLocalExperts = 2 };

EP_TEST(ll_bits_from_any_home) {
    const unsigned ranks = (unsigned)env->size;
    const RefShape shape = {kLocalExperts * ranks, kTokens, ranks, ncclBfloat16, kHidden};
    ref_begin_invariant_sums();
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, &shape);
    LlRun run = ll_run_open(env, group, &shape, ref_routing_everywhere(ranks, shape.num_experts, kTokens), 1);
    ll_dispatch(&run);
    ll_prepare_combine(&run);
    // Half of each source's tokens are in an expert's rows, source by source.
    EP_SCOPED char* rows = ref_host_new(run.results_in.bytes);
    for (unsigned expert = 0; expert < kLocalExperts; ++expert) {
        for (size_t i = 0; i < ranks * kTokens / kLocalExperts; ++i) {
            const size_t token = i % (kTokens / kLocalExperts) * kLocalExperts + expert;
            const size_t slot = ref_layout_row(run.layout, expert, i);
            ref_answer((unsigned)env->rank, token, kHidden, rows + slot * kHidden * 2);
        }
    }
    ref_buffer_upload(&run.results_in, rows);
    RefRouting* same = ref_routing_everywhere(ranks, shape.num_experts, kTokens);
    ref_buffer_upload(&run.weights, same->weights[env->rank]);
    ref_routing_free(same);
    EP_CHECK_NCCL(ll_launch_combine(&run, env->stream, false));
    ep_sync(env);
    ref_check_same_everywhere(&run.combined);
    ll_run_close(&run);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
    ref_end_invariant_sums();
}
