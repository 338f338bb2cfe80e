// A rank dies while the others make or end memory that peers map, their own or that of views.
#include "suites/death/work.h"

enum { kBytes = 5000 };

typedef enum { kAllocates, kFrees, kViews } MemoryCall;

static void lose_in_a_memory_call(DeathRank* self, MemoryCall call) {
    const EpEnv* env = &self->env;
    RefRun run = open_work(env, 3);
    void* memory = NULL;
    void* none = NULL;
    EP_REQUIRE_NCCL(ncclEpMemAlloc(run.group, &memory, kBytes));
    lose_victim(self);
    const double start = ep_seconds();
    run.by_rank = run.as_view = call == kViews;
    const ncclResult_t result = call == kViews   ? ref_launch_dispatch(&run, kRefWhole, env->stream)
                                : call == kFrees ? ncclEpMemFree(run.group, memory)
                                                 : ncclEpMemAlloc(run.group, &none, kBytes);
    if (result == ncclSuccess && call == kViews) {
        // Views are memory of each rank alone where they are copied to.
        expect_fault(self, run.group, start);
    } else {
        EP_CHECK_RESULT(result, ncclRemoteError);
        EP_CHECK_STR_CONTAINS(ep_last_error(), " waited ");
        check_in_time(self, start);
    }
    EP_CHECK(none == NULL);
    // It is still there.
    const char byte = 1;
    ep_upload(memory, &byte, 1);
    ncclEpMemInfo_t info = {.size = sizeof(info)};
    EP_CHECK_NCCL(ncclEpMemInfo(run.group, memory, &info));
    expect_refusals(&run);
    meet(self, kNoticed, survivors(self));
    const double end = ep_seconds();
    EP_CHECK_NCCL(ref_run_end_group(&run));
    check_in_time(self, end);
    abort_and_go_on(self);
    ref_run_close(&run);
}

DEATH_CASE(dies_before_memory_is_made, kVictimDies) { lose_in_a_memory_call(self, kAllocates); }

DEATH_CASE(dies_before_memory_is_freed, kVictimDies) { lose_in_a_memory_call(self, kFrees); }

DEATH_CASE(dies_before_memory_of_views, kVictimDies) { lose_in_a_memory_call(self, kViews); }

// The group has failed in an operation by then: its memory stays.
DEATH_WORK_CASE(dies_in_a_group_with_memory, kVictimDies) {
    void* memory = NULL;
    EP_REQUIRE_NCCL(ncclEpMemAlloc(run->group, &memory, kBytes));
    lose_victim(self);
    const double start = ep_seconds();
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, self->env.stream));
    expect_fault(self, run->group, start);
    EP_CHECK_RESULT(ncclEpMemFree(run->group, memory), ncclRemoteError);
    EP_CHECK_STR_CONTAINS(ep_last_error(), "the group has failed");
    finish_survivor(self, run);
}
