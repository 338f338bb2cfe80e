// Running totals over dispatches of all kinds: the rows that each local expert receives, the time that a rank waits.
#define _GNU_SOURCE  // usleep
#include <unistd.h>

#include "harness/graphs.h"
#include "harness/nodes.h"
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

// What the last dispatch has delivered here.
static void expect_more(Counted* counted) {
    const RefRun* run = &counted->run;
    EP_SCOPED int32_t* counts = ref_host_new(run->local_experts * sizeof(int32_t));
    free(ref_ll_slots(run->sent, (unsigned)run->env->rank, run->layout, counts));
    for (unsigned i = 0; i < run->local_experts; ++i) counted->expected[i] += counts[i];
}

static void play(void* context) {
    RefRun* run = context;
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, run->env->stream));
}

EP_TEST(rows_are_counted) {
    static const Shape kShape = {3, 16, 4, ncclBfloat16, 64, kRefMessy, true};
    Counted counted;
    RefRun* const run = &counted.run;
    *run = open_shape(env, &kShape, 77);
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
    const EpCaptured captured = ep_capture(env->stream, play, run);
    for (unsigned i = 0; i < 2; ++i) {
        ref_prepare_dispatch(run);
        ep_replay(&captured);
        ep_sync(env);
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

// A dispatch that the last rank enqueues after the others.
static void dispatch_late(RefRun* run, RefPass pass) {
    const bool is_late = run->env->rank == run->env->size - 1;
    ref_prepare_dispatch(run);
    if (is_late) {
        ep_barrier();
        usleep(60000);
    }
    EP_CHECK_NCCL(ref_launch_dispatch(run, pass, run->env->stream));
    EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, run->env->stream));
    if (!is_late) ep_barrier();
    ep_sync(run->env);
    ref_check_dispatch(run);
}

EP_TEST(waits_are_timed) {
    static const Shape kShape = {3, 16, 4, ncclBfloat16, 64, kRefMessy, true};
    RefRun run = open_shape(env, &kShape, 78);
    const size_t bytes = (size_t)env->size * sizeof(int64_t);
    EP_SCOPED int64_t* got = calloc(1, bytes);
    int64_t* const waits = ep_device_upload(got, bytes);
    const int64_t* const of_last = &got[env->size - 1];
    for (unsigned way = 0; way < 3; ++way) {
        run.by_rank = way > 0;
        run.as_view = way > 1;
        ref_pair(&run);  // all ranks make the first view together
        const int64_t before = *of_last;
        EP_CHECK_NCCL(ncclEpGroupTimeWaits(run.own_group, waits));
        // On a busy machine some do not begin before the last one.
        for (unsigned turn = 0; turn < 3; ++turn) {
            dispatch_late(&run, turn == 1 ? kRefStaged : kRefWhole);
            ref_combine(&run);
        }
        EP_CHECK_NCCL(ncclEpGroupTimeWaits(run.own_group, NULL));
        ref_pair(&run);
        ep_download(got, waits, bytes);
        // Messages of other nodes are waited for before.
        const bool waited = env->rank != env->size - 1 && ep_num_nodes() == 1;
        EP_CHECK(*of_last - before > (waited ? 1000000 : -1));
    }
    const int64_t last = *of_last;
    ref_pair(&run);
    ep_download(got, waits, bytes);
    EP_CHECK(*of_last == last);
    ep_device_free(waits);
    ref_run_close(&run);
}
