// High-throughput operations in every order: repeated, combined before any dispatch, interleaved
// over handles and groups, on unordered streams, and many back to back.
#include "reference/ht_run.h"

static RefShape small_shape(const EpEnv* env, unsigned max_tokens, unsigned top_k) {
    return (RefShape){3 * (unsigned)env->size, max_tokens, top_k, ncclBfloat16, 40};
}

// No two runs of a program have the same data.
static void open_runs(HtRun* runs, unsigned count, const EpEnv* env, ncclEpGroup_t group, const RefShape* shape) {
    static unsigned opened;
    for (unsigned i = 0; i < count; ++i) {
        const unsigned n = opened++;
        const HtOpening opening = {(HtRows)(n % 3), (HtCounter)(n / 3 % 3), 1000 + 1000 * n};
        RefShape own = *shape;
        own.top_k = 1 + n % shape->top_k;
        runs[i] = ht_run_open_with(env, group, &own, n % 2 == 0 ? kRefMessy : kRefDistinct, n % 3 != 0, opening);
        runs[i].variation = n;
    }
}

static void close_runs(HtRun* runs, unsigned count) {
    for (unsigned i = 0; i < count; ++i) ht_run_close(&runs[i]);
}

static void destroy(const EpEnv* env, ncclEpGroup_t group) { EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream)); }

EP_TEST(ht_repeated_dispatches) {
    const RefShape shape = small_shape(env, 12, 4);
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape);
    HtRun run;
    open_runs(&run, 1, env, group, &shape);
    for (unsigned i = 0; i < 5; ++i) ht_forward(&run);
    for (unsigned i = 0; i < 5; ++i) ht_cached(&run);
    ht_combine(&run, false);
    ht_forward(&run);
    for (unsigned i = 0; i < 3; ++i) ht_combine(&run, i % 2 == 0);
    ht_run_close(&run);
    destroy(env, group);
}

EP_TEST(ht_combine_without_dispatch) {
    const RefShape shape = small_shape(env, 12, 4);
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape);
    HtRun run;
    for (unsigned i = 0; i < 3; ++i) {
        open_runs(&run, 1, env, group, &shape);
        ht_combine(&run, i % 2 == 0);
        ht_cached(&run);
        ht_run_close(&run);
    }
    destroy(env, group);
}

EP_TEST(ht_interleaved_handles) {
    enum { kRuns = 5 };
    const RefShape shape = small_shape(env, 10, 4);
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape);
    HtRun runs[kRuns];
    open_runs(runs, kRuns, env, group, &shape);
    for (unsigned i = 0; i < 2; ++i) {
        for (unsigned r = 0; r < kRuns; ++r) ht_forward(&runs[r]);
        for (unsigned r = 0; r < kRuns; ++r) ht_combine(&runs[r], false);
        for (unsigned r = kRuns; r-- > 0;) ht_cached(&runs[r]);
        for (unsigned r = 0; r < kRuns; ++r) ht_combine(&runs[r], true);
    }
    ht_run_close(&runs[0]);
    open_runs(&runs[0], 1, env, group, &shape);  // a new handle between operations of others
    ht_cached(&runs[1]);
    ht_forward(&runs[0]);
    ht_combine(&runs[1], true);
    close_runs(runs, kRuns);
    destroy(env, group);
}

EP_TEST(ht_interleaved_groups) {
    RefShape shapes[] = {small_shape(env, 10, 4), small_shape(env, NCCL_EP_AUTO, 2)};
    shapes[1].datatype = ncclFloat32;
    ncclEpGroup_t groups[2];
    HtRun runs[4];
    for (unsigned g = 0; g < 2; ++g) groups[g] = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shapes[g]);
    for (unsigned g = 0; g < 2; ++g) open_runs(&runs[2 * g], 2, env, groups[g], &shapes[g]);
    for (unsigned i = 0; i < 3; ++i) {
        for (unsigned r = 0; r < 4; ++r) ht_forward(&runs[(r * 3 + i) % 4]);
        for (unsigned r = 0; r < 4; ++r) ht_combine(&runs[(r + i) % 4], i == 1);
    }
    close_runs(runs, 2);
    destroy(env, groups[0]);
    ht_forward(&runs[2]);  // one group outlives the other
    ht_combine(&runs[2], true);
    close_runs(&runs[2], 2);
    destroy(env, groups[1]);
}

// Two handles on two streams: only the library orders their operations. In every second round each
// combine is on the other stream than its dispatch.
EP_TEST(ht_unordered_streams) {
    enum { kRuns = 2, kRounds = 20 };
    const HtPass forward = {.forward = true, .counter = true};
    const RefShape shape = small_shape(env, 16, 3);
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape);
    cudaStream_t streams[kRuns];
    HtRun runs[kRuns];
    ep_open_streams(streams, kRuns);
    open_runs(runs, kRuns, env, group, &shape);
    for (unsigned i = 0; i < kRounds; ++i) {
        for (unsigned r = 0; r < kRuns; ++r) ht_prepare(&runs[r]);
        EP_CHECK_CUDA(cudaDeviceSynchronize());
        for (unsigned r = 0; r < kRuns; ++r) EP_CHECK_NCCL(ht_launch_dispatch(&runs[r], forward, streams[r]));
        for (unsigned r = 0; r < kRuns; ++r) {
            EP_CHECK_NCCL(ht_launch_combine(&runs[r], i % 4 < 2, streams[(r + i) % kRuns]));
        }
        for (unsigned r = 0; r < kRuns; ++r) EP_CHECK_CUDA(cudaStreamSynchronize(streams[r]));
        for (unsigned r = 0; r < kRuns; ++r) ht_check(&runs[r]);
    }
    close_runs(runs, kRuns);
    ep_close_streams(streams, kRuns);
    destroy(env, group);
}

// All inputs are ready beforehand. The host waits only now and then, and not on all ranks.
EP_TEST(ht_without_a_pause) {
    enum { kRuns = 4, kOperations = 400 };
    const HtPass forward = {.forward = true, .counter = true};
    const RefShape shape = small_shape(env, 4, 3);
    ncclEpGroup_t groups[2] = {ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape),
                               ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape)};
    HtRun runs[kRuns];
    for (unsigned r = 0; r < kRuns; ++r) {
        open_runs(&runs[r], 1, env, groups[r % 2], &shape);
        ht_prepare_dispatch(&runs[r]);
        EP_CHECK_NCCL(ht_launch_dispatch(&runs[r], forward, env->stream));
        ht_prepare_combine(&runs[r]);
        EP_CHECK_NCCL(ht_launch_combine(&runs[r], true, env->stream));
    }
    uint64_t same_on_all_ranks = 12;
    uint64_t own = (uint64_t)env->rank;
    for (unsigned i = 0; i < kOperations; ++i) {
        HtRun* run = &runs[ep_random_below(&same_on_all_ranks, kRuns)];
        const bool dispatch = ep_random_below(&same_on_all_ranks, 2) == 0;
        EP_CHECK_NCCL(dispatch ? ht_launch_dispatch(run, forward, env->stream)
                               : ht_launch_combine(run, true, env->stream));
        if (ep_random_below(&own, 50) == 0) {
            ep_sync(env);
            ht_check(run);
        }
    }
    ep_sync(env);
    for (unsigned r = 0; r < kRuns; ++r) ht_check(&runs[r]);
    close_runs(runs, kRuns);
    destroy(env, groups[0]);
    destroy(env, groups[1]);
}

// All tokens go to rank 0, which is late: the others' dispatches have nothing to wait for but that it begins.
EP_TEST(ht_ranks_without_rows_run_ahead) {
    enum { kTimes = 6, kRounds = 4 };
    if (ep_on_host_backend()) {
        ep_skip("on the CPU backend nothing is enqueued");
        return;
    }
    const RefShape shape = small_shape(env, 6, 2);
    const HtPass cached = {.forward = false};
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape);
    for (unsigned round = 0; round < kRounds; ++round) {
        const HtOpening opening = {kHtRowsSpare, kHtNoCounter, 40 + round};
        EpGate gate;
        HtRun run = ht_run_open_with(env, group, &shape, kRefOneExpert, false, opening);
        ht_prepare_dispatch(&run);
        const bool is_late = env->rank == 0;
        if (is_late) ep_gate_close(&gate, env->stream);
        for (unsigned i = 0; i < kTimes; ++i) EP_CHECK_NCCL(ht_launch_dispatch(&run, cached, env->stream));
        if (is_late) ep_gate_open(&gate);
        ep_sync(env);
        ht_check_dispatch(&run);
        ht_run_close(&run);
    }
    destroy(env, group);
}
