// Running totals over dispatches of all kinds: the rows that each local expert receives, the time that a rank waits.
#include "harness/graphs.h"
#include "suites/ll/shapes.h"

typedef struct {
    RefRun run;
    int64_t* totals;    // on the device
    int64_t* expected;
} Counted;

static void expect_totals(const Counted* counted) {
    const size_t bytes = counted->run.local_experts * sizeof(int64_t);
    EP_SCOPED int64_t* got = ref_host_new(bytes);
    ep_download(got, counted->totals, bytes);
    EP_CHECK_EQ_BYTES(got, counted->expected, bytes);
}

// Adds what the last dispatch of `run` has delivered here, so many times.
static void add_rows(const RefRun* run, int64_t times, int64_t* totals) {
    EP_SCOPED int32_t* counts = ref_host_new(run->local_experts * sizeof(int32_t));
    free(ref_ll_slots(run->sent, (unsigned)run->env->rank, run->layout, counts));
    for (unsigned i = 0; i < run->local_experts; ++i) totals[i] += times * counts[i];
}

static void expect_more(Counted* counted) { add_rows(&counted->run, 1, counted->expected); }

EP_TEST(rows_are_counted) {
    static const Shape kShape = {3, 16, 4, ncclBfloat16, 64, kRefMessy, true};
    Counted counted;
    RefRun* const run = &counted.run;
    *run = open_shape(env, &kShape, false, 77);
    const size_t bytes = kShape.local_experts * sizeof(int64_t);
    counted.expected = calloc(1, bytes);
    EP_REQUIRE(counted.expected != NULL);
    counted.expected[0] = INT64_C(1) << 40;  // they go on from what is there
    counted.totals = ep_device_upload(counted.expected, bytes);
    ref_dispatch(run);
    expect_totals(&counted);

    EP_CHECK_NCCL(ncclEpGroupCountRows(run->own_group, counted.totals));
    for (unsigned i = 0; i < 2; ++i) {
        ref_run_mask(run, 5);
        ref_dispatch(run);
        ref_combine(run);
        expect_more(&counted);
    }
    ref_dispatch_as(run, kRefStaged);
    expect_more(&counted);
    expect_totals(&counted);

    ref_prepare_dispatch(run);
    const EpCaptured captured = ep_capture(env->stream, ref_play_dispatch, run);
    for (unsigned i = 0; i < 2; ++i) {
        ref_prepare_dispatch(run);
        ep_replay(&captured);
        ref_check_dispatch(run);
        expect_more(&counted);
    }
    ep_release_captured(&captured);
    expect_totals(&counted);

    // No numbers of rows by expert.
    run->without_counter = true;
    ref_dispatch(run);
    run->without_counter = false;
    run->by_rank = true;
    ref_dispatch(run);
    run->by_rank = false;
    EP_CHECK_NCCL(ncclEpGroupCountRows(run->own_group, NULL));
    ref_dispatch(run);
    expect_totals(&counted);
    ep_device_free(counted.totals);
    free(counted.expected);
    ref_run_close(run);
}

// Two handles on two streams have one counter, which each dispatch overwrites.
EP_TEST(rows_are_counted_before_the_next_dispatch) {
    enum { kHandles = 2, kTurns = 50, kLocalExperts = 3 };
    RefRun runs[kHandles];
    const RefShape shape = {kLocalExperts * (unsigned)env->size, 16, 4, ncclBfloat16, 64};
    ref_runs_open(runs, kHandles, env, &shape, kRefMessy, true, ref_ll(79));
    int64_t expected[kLocalExperts] = {0};
    int64_t got[kLocalExperts];
    int64_t* totals = ep_device_upload(expected, sizeof(expected));
    EP_CHECK_NCCL(ncclEpGroupCountRows(runs[0].group, totals));
    cudaStream_t streams[kHandles] = {env->stream};
    EP_REQUIRE_CUDA(cudaStreamCreate(&streams[1]));
    const RefBuffer own = runs[1].counter;
    runs[1].counter = runs[0].counter;
    for (unsigned i = 0; i < kHandles; ++i) ref_prepare_dispatch(&runs[i]);
    ep_sync(env);
    for (unsigned i = 0; i < kTurns * kHandles; ++i) {
        EP_CHECK_NCCL(ref_launch_dispatch(&runs[i % kHandles], kRefWhole, streams[i % kHandles]));
    }
    for (unsigned i = 0; i < kHandles; ++i) {
        EP_CHECK_CUDA(cudaStreamSynchronize(streams[i]));
        add_rows(&runs[i], kTurns, expected);
    }
    ep_download(got, totals, sizeof(got));
    EP_CHECK_EQ_BYTES(got, expected, sizeof(got));
    runs[1].counter = own;
    EP_CHECK_CUDA(cudaStreamDestroy(streams[1]));
    ref_runs_close(runs, kHandles);
    ep_device_free(totals);
}

EP_TEST(ll_waits_are_timed) {
    static const Shape kShape = {3, 16, 4, ncclBfloat16, 64, kRefMessy, true};
    REF_SCOPED RefRun run = open_shape(env, &kShape, false, 78);
    for (unsigned way = 0; way < 3; ++way) {
        run.by_rank = way > 0;
        run.as_view = way > 1;
        waits_are_timed(&run, false);
        waits_are_timed(&run, true);
    }
}
