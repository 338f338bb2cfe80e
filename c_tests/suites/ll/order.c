// Low-latency operations in every order: repeated, interleaved over handles and groups, on
// unordered streams, with ids that change between operations, and a thousand back to back.
#define _GNU_SOURCE  // usleep
#include <unistd.h>

#include "reference/ll_run.h"

enum { kHidden = 40 };

static RefShape small_shape(const EpEnv* env, unsigned max_tokens, unsigned top_k) {
    return (RefShape){2 * (unsigned)env->size, max_tokens, top_k, ncclBfloat16, kHidden};
}

// No two runs of a program have the same data.
static void open_runs(LlRun* runs, unsigned count, const EpEnv* env, ncclEpGroup_t group, const RefShape* shape) {
    static unsigned opened;
    for (unsigned i = 0; i < count; ++i) {
        const unsigned n = opened++;
        RefShape own = *shape;
        own.top_k = 1 + n % shape->top_k;
        runs[i] = ll_run_open_with(env, group, &own, n % 2 == 0 ? kRefMessy : kRefDistinct, n % 3 != 0,
                                   1000 + 1000 * (uint64_t)n);
        runs[i].variation = n;
    }
}

static void close_runs(LlRun* runs, unsigned count) {
    for (unsigned i = 0; i < count; ++i) ll_run_close(&runs[i]);
}

static void destroy(const EpEnv* env, ncclEpGroup_t group) { EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream)); }

EP_TEST(ll_repeated_operations) {
    const RefShape shape = small_shape(env, 12, 3);
    LlRun run = ll_run_open_alone(env, &shape, kRefMessy, true, 1);
    for (unsigned i = 0; i < 7; ++i) ll_dispatch(&run);
    for (unsigned i = 0; i < 7; ++i) ll_combine(&run);
    ll_dispatch(&run);
    ll_combine(&run);
    for (unsigned i = 0; i < 3; ++i) ll_dispatch(&run);
    for (unsigned i = 0; i < 2; ++i) ll_combine(&run);
    ll_run_close(&run);
}

EP_TEST(ll_ids_updated_in_place) {
    const RefShape shape = small_shape(env, 12, 3);
    LlRun run = ll_run_open_alone(env, &shape, kRefDistinct, true, 3);
    for (unsigned i = 0; i < 2 * kRefNumStyles; ++i) {
        ll_dispatch(&run);
        ll_combine(&run);
        ll_run_reroute(&run, ref_routing_new((unsigned)env->size, shape.num_experts, shape.top_k, run.now->num_tokens,
                                             (RefStyle)(i % kRefNumStyles), 60 + i));
    }
    ll_run_close(&run);
}

EP_TEST(ll_ids_masked_before_combine) {
    const RefShape shape = small_shape(env, 16, 4);
    LlRun run = ll_run_open_alone(env, &shape, kRefRepeating, true, 4);
    for (unsigned every = 4; every >= 1; --every) {
        ll_dispatch(&run);
        ll_run_mask(&run, every);
        ll_combine(&run);
    }
    ll_dispatch(&run);  // everything is masked now
    ll_combine(&run);
    ll_run_close(&run);
}

EP_TEST(ll_interleaved_handles) {
    enum { kRuns = 5 };
    const RefShape shape = small_shape(env, 10, 4);
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, &shape);
    LlRun runs[kRuns];
    open_runs(runs, kRuns, env, group, &shape);
    for (unsigned i = 0; i < 3; ++i) {  // D(A) D(B) ... C(A) C(B) ...
        for (unsigned r = 0; r < kRuns; ++r) ll_dispatch(&runs[r]);
        for (unsigned r = 0; r < kRuns; ++r) ll_combine(&runs[r]);
    }
    for (unsigned r = 0; r < kRuns; ++r) ll_dispatch(&runs[r]);
    for (unsigned r = kRuns; r-- > 0;) ll_combine(&runs[r]);  // in the reverse order
    ll_run_close(&runs[0]);                                   // destroy a handle after an odd number of operations
    ll_dispatch(&runs[1]);
    ll_combine(&runs[2]);
    close_runs(runs + 1, kRuns - 1);
    destroy(env, group);
}

EP_TEST(ll_interleaved_groups) {
    const RefShape shapes[] = {small_shape(env, 10, 4), small_shape(env, 3, 2)};
    ncclEpGroup_t groups[2];
    LlRun runs[4];
    for (unsigned g = 0; g < 2; ++g) groups[g] = ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, &shapes[g]);
    for (unsigned g = 0; g < 2; ++g) open_runs(&runs[2 * g], 2, env, groups[g], &shapes[g]);
    for (unsigned i = 0; i < 3; ++i) {
        for (unsigned r = 0; r < 4; ++r) ll_dispatch(&runs[(r * 3 + i) % 4]);
        for (unsigned r = 0; r < 4; ++r) ll_combine(&runs[(r + i) % 4]);
    }
    close_runs(runs, 2);
    destroy(env, groups[0]);
    ll_dispatch(&runs[2]);  // one group outlives the other
    ll_combine(&runs[2]);
    close_runs(&runs[2], 2);
    destroy(env, groups[1]);
}

// Two handles on two streams: only the library orders their operations. In every second round each
// combine is on the other stream than its dispatch.
EP_TEST(ll_unordered_streams) {
    enum { kRuns = 2, kRounds = 20 };
    const RefShape shape = small_shape(env, 16, 3);
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, &shape);
    cudaStream_t streams[kRuns];
    LlRun runs[kRuns];
    ep_open_streams(streams, kRuns);
    open_runs(runs, kRuns, env, group, &shape);
    for (unsigned i = 0; i < kRounds; ++i) {
        for (unsigned r = 0; r < kRuns; ++r) ll_prepare(&runs[r]);
        EP_CHECK_CUDA(cudaDeviceSynchronize());
        for (unsigned r = 0; r < kRuns; ++r) EP_CHECK_NCCL(ll_launch_dispatch(&runs[r], streams[r], false));
        for (unsigned r = 0; r < kRuns; ++r) {
            EP_CHECK_NCCL(ll_launch_combine(&runs[r], streams[(r + i) % kRuns], false));
        }
        for (unsigned r = 0; r < kRuns; ++r) EP_CHECK_CUDA(cudaStreamSynchronize(streams[r]));
        for (unsigned r = 0; r < kRuns; ++r) ll_check(&runs[r]);
    }
    close_runs(runs, kRuns);
    ep_close_streams(streams, kRuns);
    destroy(env, group);
}

// All inputs are ready beforehand. The host waits only now and then, and not on all ranks.
EP_TEST(ll_thousand_operations) {
    enum { kRuns = 6, kOperations = 1000 };
    const RefShape shape = small_shape(env, 4, 3);
    ncclEpGroup_t groups[2] = {ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, &shape),
                               ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, &shape)};
    LlRun runs[kRuns];
    for (unsigned r = 0; r < kRuns; ++r) {
        open_runs(&runs[r], 1, env, groups[r % 2], &shape);
        ll_prepare_dispatch(&runs[r]);
        EP_CHECK_NCCL(ll_launch_dispatch(&runs[r], env->stream, false));
        ep_sync(env);
        ll_prepare_combine(&runs[r]);
        EP_CHECK_NCCL(ll_launch_combine(&runs[r], env->stream, false));
    }
    uint64_t same_on_all_ranks = 11;
    uint64_t own = (uint64_t)env->rank;
    for (unsigned i = 0; i < kOperations; ++i) {
        LlRun* run = &runs[ep_random_below(&same_on_all_ranks, kRuns)];
        const bool dispatch = ep_random_below(&same_on_all_ranks, 2) == 0;
        EP_CHECK_NCCL(dispatch ? ll_launch_dispatch(run, env->stream, false)
                               : ll_launch_combine(run, env->stream, false));
        if (ep_random_below(&own, 50) == 0) {
            ep_sync(env);
            ll_check(run);
        }
    }
    ep_sync(env);
    for (unsigned r = 0; r < kRuns; ++r) ll_check(&runs[r]);
    close_runs(runs, kRuns);
    destroy(env, groups[0]);
    destroy(env, groups[1]);
}

// Creating a handle must wait for no other rank. Filling memory on a stream ordered with the
// default one would wait: for a dispatch that waits for ranks that wait for their handles.
EP_TEST(ll_handle_while_a_dispatch_waits) {
    enum { kHandles = 3 };
    const RefShape shape = small_shape(env, 12, 3);
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, &shape);
    LlRun run = ll_run_open_with(env, group, &shape, kRefMessy, false, 71);
    ll_prepare_dispatch(&run);
    EP_CHECK_CUDA(cudaDeviceSynchronize());
    void* ids = ref_buffer_data(&run.ids);
    ncclEpHandle_t handles[kHandles];
    // The others dispatch once rank 0 has its handles.
    if (env->rank != 0) ep_barrier();
    EP_CHECK_NCCL(ll_launch_dispatch(&run, NULL, false));
    for (unsigned i = 0; i < kHandles; ++i) {
        EP_CHECK_NCCL(ep_handle_create(&handles[i], group, ids, shape.max_tokens, shape.top_k, NULL));
    }
    if (env->rank == 0) ep_barrier();
    EP_CHECK_CUDA(cudaDeviceSynchronize());
    ll_check_dispatch(&run);
    for (unsigned i = 0; i < kHandles; ++i) EP_CHECK_NCCL(ncclEpHandleDestroy(handles[i]));
    ll_run_close(&run);
    destroy(env, group);
}

// A handle ends while its operation is still on the stream. The next one, with fewer tokens, which ranks of other nodes
// hear of at once, must not change that operation.
EP_TEST(ll_handle_ends_before_its_operation) {
    const RefShape shape = small_shape(env, 12, 3);
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, &shape);
    for (unsigned round = 0; round < 3; ++round) {
        LlRun run = ll_run_open_with(env, group, &shape, kRefMessy, true, 72 + round);
        ll_dispatch(&run);
        ll_prepare_dispatch(&run);
        EP_CHECK_CUDA(cudaDeviceSynchronize());
        EpGate gate;
        ep_gate_close(&gate, env->stream);
        EP_CHECK_NCCL(ll_launch_dispatch(&run, env->stream, false));
        EP_CHECK_NCCL(ncclEpHandleDestroy(run.handle));
        ncclEpHandle_t next = NULL;
        EP_CHECK_NCCL(ep_handle_create(&next, group, ref_buffer_data(&run.ids), 1, shape.top_k, NULL));
        usleep(50000);
        ep_gate_open(&gate);
        ep_sync(env);
        ll_check_dispatch(&run);
        EP_CHECK_NCCL(ncclEpHandleDestroy(next));
        run.handle = NULL;
        ll_run_close(&run);
    }
    destroy(env, group);
}
