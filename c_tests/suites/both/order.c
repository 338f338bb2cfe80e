// Operations in every order, alike in both modes: interleaved over handles and groups, on unordered streams, and many
// back to back. Every second dispatch is cached, and every second combine backward, where the mode has them.
#include "suites/both/both.h"

static RefShape small_shape(const EpEnv* env, unsigned max_tokens, unsigned top_k) {
    return (RefShape){3 * (unsigned)env->size, max_tokens, top_k, ncclBfloat16, 40};
}

static void open_runs(RefRun* runs, unsigned count, const EpEnv* env, ncclEpGroup_t group, const RefShape* shape,
                      bool ht) {
    static unsigned opened;
    for (unsigned i = 0; i < count; ++i) {
        const unsigned n = opened++;
        const RefOpening opening =
            ref_opening(ht, (HtRows)(n % 3), (HtCounter)(n / 3 % 3), 1000 + 1000 * (uint64_t)n);
        RefShape own = *shape;
        own.top_k = 1 + n % shape->top_k;
        runs[i] = ref_run_open_with(env, group, &own, n % 2 == 0 ? kRefMessy : kRefDistinct, n % 3 != 0, opening);
        runs[i].variation = n;
    }
}

static ncclEpGroup_t open_group(const EpEnv* env, const RefShape* shape, bool ht) {
    return ref_group_new(env, ht ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY, shape);
}

static void close_group(const EpEnv* env, ncclEpGroup_t group) {
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}

static RefPass dispatch_of(unsigned i) { return i % 2 == 0 ? kRefCounted : kRefCached; }
static RefPass combine_of(unsigned i) { return i % 2 == 0 ? kRefWhole : kRefBackward; }

void interleaved_handles(EpEnv* env, bool ht) {
    enum { kRuns = 5, kRounds = 4 };
    const RefShape shape = small_shape(env, 10, 4);
    ncclEpGroup_t group = open_group(env, &shape, ht);
    RefRun runs[kRuns];
    open_runs(runs, kRuns, env, group, &shape, ht);
    for (unsigned i = 0; i < kRounds; ++i) {  // D(A) D(B) ... C(A) C(B) ..., and at last C in the reverse order
        for (unsigned r = 0; r < kRuns; ++r) ref_dispatch_as(&runs[r], dispatch_of(i));
        for (unsigned r = 0; r < kRuns; ++r) {
            ref_combine_as(&runs[i == kRounds - 1 ? kRuns - 1 - r : r], combine_of(i));
        }
    }
    ref_run_close(&runs[0]);  // after an odd number of operations of the next one
    ref_dispatch(&runs[1]);
    ref_combine(&runs[2]);
    open_runs(&runs[0], 1, env, group, &shape, ht);  // a new handle between operations of others
    ref_dispatch(&runs[0]);
    ref_combine_as(&runs[1], kRefBackward);
    ref_runs_close(runs, kRuns);
    close_group(env, group);
}

void interleaved_groups(EpEnv* env, bool ht) {
    RefShape shapes[] = {small_shape(env, 10, 4), small_shape(env, ht ? NCCL_EP_AUTO : 3, 2)};
    if (ht) shapes[1].datatype = ncclFloat32;
    ncclEpGroup_t groups[2];
    RefRun runs[4];
    for (unsigned g = 0; g < 2; ++g) groups[g] = open_group(env, &shapes[g], ht);
    for (unsigned g = 0; g < 2; ++g) open_runs(&runs[2 * g], 2, env, groups[g], &shapes[g], ht);
    for (unsigned i = 0; i < 3; ++i) {
        for (unsigned r = 0; r < 4; ++r) ref_dispatch(&runs[(r * 3 + i) % 4]);
        for (unsigned r = 0; r < 4; ++r) ref_combine_as(&runs[(r + i) % 4], combine_of(i));
    }
    ref_runs_close(runs, 2);
    close_group(env, groups[0]);
    ref_dispatch(&runs[2]);  // one group outlives the other
    ref_combine_as(&runs[2], kRefBackward);
    ref_runs_close(&runs[2], 2);
    close_group(env, groups[1]);
}

// Two handles on two streams: only the library orders their operations. In every second round each
// combine is on the other stream than its dispatch.
void unordered_streams(EpEnv* env, bool ht) {
    enum { kRuns = 2, kRounds = 20 };
    const RefShape shape = small_shape(env, 16, 3);
    ncclEpGroup_t group = open_group(env, &shape, ht);
    cudaStream_t streams[kRuns];
    RefRun runs[kRuns];
    ep_open_streams(streams, kRuns);
    open_runs(runs, kRuns, env, group, &shape, ht);
    for (unsigned i = 0; i < kRounds; ++i) {
        for (unsigned r = 0; r < kRuns; ++r) ref_prepare(&runs[r]);
        EP_CHECK_CUDA(cudaDeviceSynchronize());
        for (unsigned r = 0; r < kRuns; ++r) EP_CHECK_NCCL(ref_launch_dispatch(&runs[r], kRefCounted, streams[r]));
        for (unsigned r = 0; r < kRuns; ++r) {
            EP_CHECK_NCCL(ref_launch_combine(&runs[r], combine_of(i / 2), streams[(r + i) % kRuns]));
        }
        for (unsigned r = 0; r < kRuns; ++r) EP_CHECK_CUDA(cudaStreamSynchronize(streams[r]));
        for (unsigned r = 0; r < kRuns; ++r) ref_check(&runs[r]);
    }
    ref_runs_close(runs, kRuns);
    ep_close_streams(streams, kRuns);
    close_group(env, group);
}

// All inputs are ready beforehand. The host waits only now and then, and not on all ranks.
void without_a_pause(EpEnv* env, bool ht, unsigned num_runs, unsigned operations) {
    const RefShape shape = small_shape(env, 4, 3);
    ncclEpGroup_t groups[2] = {open_group(env, &shape, ht), open_group(env, &shape, ht)};
    RefRun runs[kMostRuns];
    for (unsigned r = 0; r < num_runs; ++r) {
        open_runs(&runs[r], 1, env, groups[r % 2], &shape, ht);
        ref_prepare_dispatch(&runs[r]);
        EP_CHECK_NCCL(ref_launch_dispatch(&runs[r], kRefCounted, env->stream));
        ep_sync(env);
        ref_prepare_combine(&runs[r]);
        EP_CHECK_NCCL(ref_launch_combine(&runs[r], kRefBackward, env->stream));
    }
    uint64_t same_on_all_ranks = 11;
    uint64_t own = (uint64_t)env->rank;
    for (unsigned i = 0; i < operations; ++i) {
        RefRun* run = &runs[ep_random_below(&same_on_all_ranks, num_runs)];
        const bool dispatch = ep_random_below(&same_on_all_ranks, 2) == 0;
        EP_CHECK_NCCL(dispatch ? ref_launch_dispatch(run, kRefCounted, env->stream)
                               : ref_launch_combine(run, kRefBackward, env->stream));
        if (ep_random_below(&own, 50) == 0) {
            ref_check(run);
        }
    }
    for (unsigned r = 0; r < num_runs; ++r) ref_check(&runs[r]);
    ref_runs_close(runs, num_runs);
    close_group(env, groups[0]);
    close_group(env, groups[1]);
}
