// Updates in graphs: each replay routes by the ids that are there then, beside updates outside of graphs.
#include "harness/graphs.h"
#include "suites/second/ht_run.h"

enum { kReplays = 3 };

typedef struct {
    const HtRun* run;
    ncclEpHandle_t handle;
} Work;

static void play(void* context) {
    const Work* work = context;
    EP_CHECK_NCCL(ht_launch_update(work->run, work->handle));
    EP_CHECK_NCCL(ht_launch_dispatch(work->run, work->handle));
    EP_CHECK_NCCL(ht_launch_combine_back(work->run, work->handle));
}

static void check_replay(const EpCaptured* captured, const HtRun* run) {
    ht_poison(run);
    ep_replay(captured);
    ep_sync(run->in.env);
    ht_check_counters(run);
    ht_check_dispatch(run);
    ht_check_combine_back(run);
}

static void replay_beside(const EpEnv* env, const Case* test, const Case* other_test) {
    HtRun run, other;
    ht_open(&run, env, test, 900);
    ht_open(&other, env, other_test, 910);
    ncclEpGroup_t group = group_of(env, test);
    const Work work = {&run, handle_without_routing(group, test)};
    ncclEpHandle_t beside = handle_without_routing(group, other_test);
    const EpCaptured captured = ep_capture(env->stream, play, (void*)&work);
    for (unsigned i = 0; i < kReplays; ++i) {
        ht_renew(&run, 920 + i);
        check_replay(&captured, &run);
        // As often as it shows whether both count alike.
        for (unsigned turn = 0; turn < i; ++turn) {
            ht_renew(&other, 930 + turn);
            EP_CHECK_NCCL(ht_launch_update(&other, beside));
        }
        if (i > 0) {
            ht_exchange(&other, beside);
            ht_check_counters(&other);
        }
        // Twice with the same ids.
        check_replay(&captured, &run);
    }
    ep_release_captured(&captured);
    EP_CHECK_NCCL(ncclEpHandleDestroy(work.handle));
    EP_CHECK_NCCL(ncclEpHandleDestroy(beside));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    if (test->memory != NULL) ref_buffer_free(test->memory);
    ht_close(&run);
    ht_close(&other);
}

EP_TEST(updates_are_captured) {
    RefBuffer memory;
    Case test = kSmallHt;
    test.max_tokens = 12;
    test.top_k = 3;
    test.local_experts = 3;
    test.uneven = true;
    test.recv_rows = (unsigned)env->size * test.max_tokens;
    const Case other = test;
    replay_beside(env, &test, &other);
    test.memory = &memory;
    test.narrow_ids = true;
    replay_beside(env, &test, &other);
}
