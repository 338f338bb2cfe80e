// Running totals of the rows that each local expert receives.
#include "reference/ht_run.h"

static void expect_totals(const HtRun* run, const int64_t* totals, int64_t dispatches) {
    EP_SCOPED int32_t* counts = ref_host_new(run->local_experts * sizeof(int32_t));
    EP_SCOPED int64_t* expected = ref_host_new(run->local_experts * sizeof(int64_t));
    EP_SCOPED int64_t* got = ref_host_new(run->local_experts * sizeof(int64_t));
    ref_ht_counts(run->routing, (unsigned)run->env->rank, counts);
    for (unsigned i = 0; i < run->local_experts; ++i) expected[i] = dispatches * counts[i];
    ep_download(got, totals, run->local_experts * sizeof(int64_t));
    EP_CHECK_EQ_BYTES(got, expected, run->local_experts * sizeof(int64_t));
}

EP_TEST(rows_are_counted) {
    const RefShape shape = {3 * (unsigned)env->size, 16, 4, ncclBfloat16, 64};
    const HtOpening opening = {kHtRowsAsTold, kHtNoCounter, 78};
    HtRun run = ht_run_open_alone(env, &shape, kRefMessy, true, opening);
    const int64_t zeros[3] = {0};
    int64_t* const totals = ep_device_upload(zeros, sizeof(zeros));
    ht_cached(&run);
    EP_CHECK_NCCL(ncclEpGroupCountRows(run.own_group, totals));
    expect_totals(&run, totals, 0);
    ht_forward(&run);
    ht_combine(&run, false);
    expect_totals(&run, totals, 1);
    ht_cached(&run);
    ht_cached(&run);
    expect_totals(&run, totals, 3);
    EP_CHECK_NCCL(ncclEpGroupCountRows(run.own_group, NULL));
    ht_cached(&run);
    expect_totals(&run, totals, 3);
    ep_device_free(totals);
    ht_run_close(&run);
}
