// A rank dies while the others hold graphs. A replay makes no call of the library, and yet its waits have the deadline.
#include <signal.h>

#include "harness/graphs.h"
#include "reference/run.h"
#include "suites/death/work.h"

enum { kReplays = 2, kReplaysPerBatch = 8, kPairs = 50 };

// Captures a pair of operations, which replays as it should.
static EpCaptured captured_pair(RefRun* run) {
    const EpCaptured captured = ep_capture(run->env->stream, ref_play_pair, run);
    for (unsigned i = 0; i < kReplays; ++i) {
        ref_prepare(run);
        ep_replay(&captured);
        ref_check(run);
    }
    return captured;
}

// Replays behind each other outlast the deadline, and each of them is short. A rank is at most one batch ahead of
// another, so rank 0 can say which is the last.
static void replay_for_long(DeathRank* self, const EpCaptured* captured) {
    atomic_uint* last = &self->shared->last_round;
    const double end = ep_seconds() + 0.0015 * self->timeout_ms;
    for (unsigned batch = 1; atomic_load(last) == 0 || batch <= atomic_load(last); ++batch) {
        for (unsigned i = 0; i < kReplaysPerBatch; ++i) ep_replay(captured);
        EP_CHECK_CUDA(cudaStreamSynchronize(self->env.stream));
        if (self->env.rank == 0 && atomic_load(last) == 0 && ep_seconds() > end) atomic_store(last, batch + 2);
    }
}

// Meets the others, one of which dies; then launches the graph.
static double replay_without_victim(DeathRank* self, const EpCaptured* captured) {
    lose_victim(self);
    const double start = ep_seconds();
    ep_replay(captured);
    return start;
}

static void play_pairs(void* run) {
    for (unsigned i = 0; i < kPairs; ++i) ref_play_pair(run);
}

// Nobody tells the others of a rank that stops; their deadline does. The graph has as many exchanges as the layers of a
// large model. All of it still runs after the failure, and over nodes NCCL's aborted kernels take their time
// (docs/several-nodes.md).
DEATH_WORK_CASE(stops_before_a_long_replay, kVictimStops) {
    enum { kMsToAbort = 200 };
    const EpCaptured captured = captured_pair(run);
    const EpCaptured pairs = ep_capture(run->env->stream, play_pairs, run);
    ref_prepare(run);
    replay_for_long(self, &captured);
    ref_check(run);
    EP_CHECK_RESULT(ep_group_state(run->group), ncclSuccess);
    lose_victim_by(self, SIGSTOP);
    const double start = ep_seconds();
    ep_replay(&pairs);
    expect_fault(self, run->group, start);
    const bool is_of_network = strstr(ep_last_error(), " in network operation ") != NULL;
    if (is_of_network) EP_CHECK_STR_CONTAINS(ep_last_error(), ", replayed by a graph");
    ep_release_captured(&pairs);
    self->slack_ms += kPairs * kMsToAbort;
    ep_release_captured(&captured);
    finish_survivor(self, run);
}

// Freeing memory waits for the replay, and holds up most calls of the driver meanwhile.
DEATH_WORK_CASE(dies_before_a_replay_and_a_free, kVictimDies) {
    allow_for_a_free(self);
    const EpCaptured captured = captured_pair(run);
    void* memory = NULL;
    EP_REQUIRE_CUDA(cudaMalloc(&memory, 1 << 20));
    const double start = replay_without_victim(self, &captured);
    EP_CHECK_CUDA(cudaFree(memory));
    check_in_time(self, start);
    expect_fault(self, run->group, start);
    ep_release_captured(&captured);
    finish_survivor(self, run);
}

// The library frees nothing beside a replay, and waits for none.
DEATH_WORK_CASE(dies_before_a_replay_and_destructions, kVictimDies) {
    const EpCaptured captured = captured_pair(run);
    RefRun other = open_work(&self->env, 2);
    ncclNDTensor_t spare;
    memset(&spare, 0, sizeof(spare));
    EP_REQUIRE_NCCL(ncclEpTensorCreate(run->group, &spare, 1, ncclInt8, NCCL_EP_TENSOR_TAG_NONE, 1 << 20, 1, 1, 1, 1));
    const double start = replay_without_victim(self, &captured);
    EP_CHECK_NCCL(ncclEpTensorDestroy(run->group, &spare));
    // The CPU backend calls instead of replaying, and waits for what it has called.
    if (!ep_on_host_backend()) EP_CHECK(ep_seconds() - start < self->timeout_ms / 2000.0);
    end_without_victim(self, &other);
    expect_fault(self, run->group, start);
    ep_release_captured(&captured);
    finish_survivor(self, run);
}

DEATH_CASE(dies_before_an_ht_replay, kVictimDies) {
    const EpEnv* env = &self->env;
    const RefShape shape = {2 * (unsigned)env->size, 9, 2, ncclBfloat16, 64};
    RefRun run = ref_run_open_with(env, NULL, &shape, kRefDistinct, false, ref_ht_as(kHtRowsExact, kHtNoCounter, 1));
    const EpCaptured captured = captured_pair(&run);
    const double start = replay_without_victim(self, &captured);
    expect_fault(self, run.group, start);
    ep_release_captured(&captured);
    meet(self, kNoticed, survivors(self));
    expect_victim_named(self);
    close_work(self, &run);
    abort_and_go_on(self);
}
