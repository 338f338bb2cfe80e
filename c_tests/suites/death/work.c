// See work.h.
#define _GNU_SOURCE  // usleep
#include "suites/death/work.h"

#include <unistd.h>

#include "harness/nodes.h"

bool host_waits_for_routing(void) { return ep_on_host_backend() || ep_num_nodes() > 1; }

void allow_for_a_free(DeathRank* self) {
    enum { kPatienceMs = 500 };
    if (ep_num_nodes() > 1) self->slack_ms += kPatienceMs;
}

// Waits until the group fails; `since` is the earliest time at which it could be known.
void expect_fault(DeathRank* self, ncclEpGroup_t group, double since) {
    ncclResult_t result = ncclSuccess;
    ncclResult_t asked = ncclEpGetAsyncError(group, &result);
    while (asked == ncclSuccess && result == ncclSuccess && in_time(self, since)) {
        usleep(kPollUs);
        asked = ncclEpGetAsyncError(group, &result);
    }
    EP_CHECK_EQ_I64(asked, ncclSuccess);
    EP_CHECK_EQ_I64(result, ncclRemoteError);
    check_in_time(self, since);
    expect_waiter_named(ep_last_error());
    note_text(self, ep_last_error());
}

void expect_refusals(RefRun* run) {
    const cudaStream_t stream = run->env->stream;
    EP_CHECK(ref_launch_dispatch(run, kRefWhole, stream) != ncclSuccess);
    EP_CHECK_STR_CONTAINS(ep_last_error(), "the group has failed");
    EP_CHECK(ref_launch_combine(run, kRefStaged, stream) != ncclSuccess);
}

void close_work(DeathRank* self, RefRun* run) {
    const double start = ep_seconds();
    EP_CHECK_NCCL(ref_run_end_group(run));
    check_in_time(self, start);
    ref_run_close(run);
}

void end_without_victim(DeathRank* self, RefRun* run) {
    const double start = ep_seconds();
    const ncclResult_t result = ref_run_end_group(run);
    // A backend whose teardown exchanges nothing has nothing to report.
    EP_CHECK(result == ncclSuccess || result == ncclRemoteError);
    check_in_time(self, start);
    ref_run_close(run);
}

void finish_survivor(DeathRank* self, RefRun* run) {
    expect_refusals(run);
    expect_context_usable(self);
    meet(self, kNoticed, survivors(self));
    expect_victim_named(self);
    close_work(self, run);
    EP_CHECK_NCCL(ncclCommAbort(self->env.comm));
    expect_context_usable(self);
    go_on_without_victim(self);
    EP_CHECK_CUDA(cudaStreamDestroy(self->env.stream));
}

void finish_behind_a_stall(DeathRank* self, RefRun* run) {
    // Memory that a peer maps is freed only after the kernels of all ranks have ended.
    meet(self, kAllKnow, self->env.size);
    close_work(self, run);
    EP_CHECK_NCCL(ncclCommAbort(self->env.comm));
    expect_context_usable(self);
    if (!is_victim(self)) go_on_without_victim(self);
    EP_CHECK_CUDA(cudaStreamDestroy(self->env.stream));
}
