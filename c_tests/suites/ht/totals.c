// Running totals: the rows that each local expert receives, the time that a rank waits.
#include "suites/both/both.h"

static void expect_totals(const RefRun* run, const int64_t* totals, int64_t dispatches) {
    EP_SCOPED int32_t* counts = ref_host_new(run->local_experts * sizeof(int32_t));
    EP_SCOPED int64_t* expected = ref_host_new(run->local_experts * sizeof(int64_t));
    EP_SCOPED int64_t* got = ref_host_new(run->local_experts * sizeof(int64_t));
    ref_ht_counts(run->sent, (unsigned)run->env->rank, counts);
    for (unsigned i = 0; i < run->local_experts; ++i) expected[i] = dispatches * counts[i];
    ep_download(got, totals, run->local_experts * sizeof(int64_t));
    EP_CHECK_EQ_BYTES(got, expected, run->local_experts * sizeof(int64_t));
}

EP_TEST(rows_are_counted) {
    const RefShape shape = {3 * (unsigned)env->size, 16, 4, ncclBfloat16, 64};
    REF_SCOPED RefRun run = ref_run_open_with(env, NULL, &shape, kRefMessy, true, ref_ht(78));
    const int64_t zeros[3] = {0};
    int64_t* const totals = ep_device_upload(zeros, sizeof(zeros));
    ref_dispatch_as(&run, kRefCached);
    EP_CHECK_NCCL(ncclEpGroupCountRows(run.own_group, totals));
    expect_totals(&run, totals, 0);
    ref_dispatch(&run);
    ref_combine(&run);
    expect_totals(&run, totals, 1);
    ref_dispatch_as(&run, kRefCached);
    ref_dispatch_as(&run, kRefCached);
    expect_totals(&run, totals, 3);
    EP_CHECK_NCCL(ncclEpGroupCountRows(run.own_group, NULL));
    ref_dispatch_as(&run, kRefCached);
    expect_totals(&run, totals, 3);
    ep_device_free(totals);
}

EP_TEST(ht_waits_are_timed) {
    const RefShape shape = {3 * (unsigned)env->size, 16, 4, ncclBfloat16, 64};
    REF_SCOPED RefRun run = ref_run_open_with(env, NULL, &shape, kRefMessy, false, ref_ht(79));
    waits_are_timed(&run, true);
}
