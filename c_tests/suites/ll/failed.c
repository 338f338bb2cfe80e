// One block of a kernel starts so late that another rank has given up waiting for it. What that rank runs after its
// failure must not reach the late block: either the block's sums are right or its group has failed.
#include "reference/run.h"

// Not the block that announces its rank's start: without the announcement the late rank itself would fail.
enum { kRuns = 3, kLateBlock = 1 };

typedef struct {
    EpEnv* env;
    RefRun runs[kRuns];        // dispatched, and ready to be combined
    cudaStream_t streams[2];  // unordered
    bool is_late;             // the last rank
} Fixture;

// All entries of a token name experts of the next rank, so no rank waits for its own row or, with
// one entry, for weights before it sends.
static RefRouting* route_to_next_rank(const RefRun* run) {
    RefRouting* routing = ref_routing_copy(run->now);
    const unsigned num_ranks = (unsigned)run->env->size;
    for (unsigned rank = 0; rank < num_ranks; ++rank) {
        const unsigned first = (rank + 1) % num_ranks * run->local_experts;
        for (size_t i = 0; i < ref_entries_of(routing, rank); ++i) {
            routing->topk_idx[rank][i] = first + i % run->local_experts;
        }
    }
    return routing;
}

static void open_fixture(Fixture* fixture, EpEnv* env, unsigned top_k) {
    const RefShape shape = {2 * (unsigned)env->size, 12, top_k, ncclBfloat16, 40};
    fixture->env = env;
    fixture->is_late = env->rank == env->size - 1;
    EP_WITH_VARIABLE("NCCL_EP_TIMEOUT_MS", "1000");
    ref_runs_open(fixture->runs, kRuns, env, &shape, kRefDistinct, false, ref_ll(80));
    ep_open_streams(fixture->streams, 2);
    for (unsigned r = 0; r < kRuns; ++r) {
        RefRun* run = &fixture->runs[r];
        ref_run_give(run, route_to_next_rank(run));
        ref_dispatch(run);
        ref_prepare_combine(run);
    }
    EP_CHECK_CUDA(cudaDeviceSynchronize());
    ep_barrier();
}

static void close_fixture(Fixture* fixture) {
    ep_close_streams(fixture->streams, 2);
    ref_runs_close(fixture->runs, kRuns);
}

// First the others fail and run what is enqueued behind; then the late block starts.
static void check_ends(Fixture* fixture, RefRun* late, cudaStream_t stream) {
    if (!fixture->is_late) {
        EP_CHECK_CUDA(cudaDeviceSynchronize());
        EP_CHECK_RESULT(ep_group_state(fixture->runs[0].group), ncclRemoteError);
    }
    ep_barrier();
    if (fixture->is_late) {
        ep_release_block();
        EP_CHECK_CUDA(cudaStreamSynchronize(stream));
        if (ep_group_state(fixture->runs[0].group) == ncclSuccess) ref_check_combine(late);
    }
    ep_barrier();
}

// Whole combines: the second one after the failed one uses the same bank.
static void fail_in_a_combine(EpEnv* env, unsigned top_k) {
    Fixture fixture;
    open_fixture(&fixture, env, top_k);
    const cudaStream_t stream = fixture.streams[0];
    if (fixture.is_late) (void)ep_hold_block(kLateBlock);
    // The late rank makes no further call, which would tell it of the failure.
    for (unsigned r = 0; r < (fixture.is_late ? 1 : kRuns); ++r) {
        EP_CHECK_NCCL(ref_launch_combine(&fixture.runs[r], kRefWhole, stream));
    }
    check_ends(&fixture, &fixture.runs[0], stream);
    close_fixture(&fixture);
}

// Every second staged combine uses the same bank and waits until the one before was received.
static void fail_in_a_staged_combine(EpEnv* env) {
    Fixture fixture;
    open_fixture(&fixture, env, 1);
    const cudaStream_t* streams = fixture.streams;
    RefRun* runs = fixture.runs;
    EP_CHECK_NCCL(ref_launch_combine(&runs[0], kRefStaged, streams[0]));
    EP_CHECK_CUDA(cudaStreamSynchronize(streams[0]));
    if (fixture.is_late) (void)ep_hold_block(kLateBlock);
    EP_CHECK_NCCL(ncclEpComplete(runs[0].handle, NULL, streams[0]));
    for (unsigned r = 1; r < (fixture.is_late ? 2 : kRuns); ++r) {
        EP_CHECK_NCCL(ref_launch_combine(&runs[r], kRefStaged, streams[1]));
        EP_CHECK_NCCL(ncclEpComplete(runs[r].handle, NULL, streams[1]));
    }
    check_ends(&fixture, &runs[0], streams[0]);
    close_fixture(&fixture);
}

static bool can_hold_blocks(const EpEnv* env) {
    const bool can = env->size > 1 && ep_hold_block(kLateBlock);
    ep_release_block();
    if (!can) ep_skip("only the CPU build can hold up a block, and only another rank waits for it");
    return can;
}

EP_TEST(ll_nothing_is_sent_behind_a_failure) {
    if (can_hold_blocks(env)) fail_in_a_combine(env, 1);
}

// An expert rank waits for the weights of a token that names it more than once.
EP_TEST(ll_no_sum_is_sent_without_its_weights) {
    if (can_hold_blocks(env)) fail_in_a_combine(env, 3);
}

EP_TEST(ll_nothing_is_sent_to_a_bank_in_use) {
    if (can_hold_blocks(env)) fail_in_a_staged_combine(env);
}
