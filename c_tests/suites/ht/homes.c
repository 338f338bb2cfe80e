// Invariant sums: the bits of a combined token do not depend on the rank that is its home, nor on that rank's node.
#include "reference/homes.h"

#include "reference/ht_run.h"

enum { kTokens = 4, kHidden = 64 };

EP_TEST(ht_bits_from_any_home) {
    const unsigned ranks = (unsigned)env->size;
    const RefShape shape = {2 * ranks, kTokens, ranks, ncclBfloat16, kHidden};
    const HtOpening opening = {kHtRowsAsTold, kHtNoCounter, 1};
    ref_begin_invariant_sums();
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape);
    HtRun run = ht_run_open(env, group, &shape, ref_routing_everywhere(ranks, shape.num_experts, kTokens), opening);
    ht_forward(&run);
    ht_prepare_combine(&run);
    EP_SCOPED char* rows = ref_host_new(run.results_in.bytes);
    for (size_t i = 0; i < ranks * kTokens; ++i) {
        ref_answer((unsigned)env->rank, i % kTokens, kHidden, rows + i * kHidden * 2);
    }
    ref_buffer_upload(&run.results_in, rows);
    EP_CHECK_NCCL(ht_launch_combine(&run, false, env->stream));
    ep_sync(env);
    ref_check_same_everywhere(&run.combined);
    ht_run_close(&run);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
    ref_end_invariant_sums();
}
