// A rank dies in the middle of high-throughput operations on rows in memory that peers map. Its last kernels may have
// offered such memory, and may be storing in that of the others or loading from there.
#define _GNU_SOURCE  // setenv
#include "reference/mapped.h"

#include "suites/death/work.h"

enum { kMostOps = 400, kOpsOfVictim = 7, kOpsInFlight = 4 };

static RefRun open_mapped(const EpEnv* env) {
    const RefShape shape = {2 * (unsigned)env->size, 16, 3, ncclBfloat16, 1024};
    EP_REQUIRE(setenv("EP_TEST_MEMORY", "mapped", 1) == 0);
    RefRun run = ref_run_open_with(env, NULL, &shape, kRefDistinct, false, ref_ht(5));
    const ncclEpChoice_t pull = {.size = sizeof(pull), .variant = NCCL_EP_VARIANT_HT_PULL};
    EP_REQUIRE_NCCL(ncclEpSetChoice(run.group, NCCL_EP_OPERATION_HT_COMBINE, &pull));
    ref_pair(&run);
    ref_prepare(&run);
    return run;
}

static ncclResult_t launch(RefRun* run, bool combines) {
    const cudaStream_t stream = run->env->stream;
    return combines ? ref_launch_combine(run, kRefWhole, stream) : ref_launch_dispatch(run, kRefWhole, stream);
}

// A few are in flight at a time.
static void run_until_fault(RefRun* run, bool combines, unsigned most) {
    for (unsigned i = 0; i < most && launch(run, combines) == ncclSuccess; ++i) {
        if (i % kOpsInFlight == kOpsInFlight - 1) EP_CHECK_CUDA(cudaStreamSynchronize(run->env->stream));
    }
}

static void lose_in_mapped(DeathRank* self, bool combines) {
    const EpEnv* env = &self->env;
    RefRun run = open_mapped(env);
    char* rows = ref_buffer_data(&run.tokens_out);
    ncclEpMemInfo_t info = {.size = sizeof(info)};
    EP_CHECK_NCCL(ncclEpMemInfo(run.group, rows, &info));
    EP_CHECK_EQ_I64(info.peers, survivors(self));
    meet(self, kReady, env->size);
    if (is_victim(self)) {
        run_until_fault(&run, combines, kOpsOfVictim);
        die(self);
    }
    run_until_fault(&run, combines, kMostOps);
    wait_for_loss(self);
    expect_fault(self, run.group, atomic_load(&self->shared->lost));
    EP_CHECK(launch(&run, combines) != ncclSuccess);
    EP_CHECK_STR_CONTAINS(ep_last_error(), "the group has failed");
    // What the peers mapped is still there, and stays: one of them may write to it.
    EP_CHECK_RESULT(ncclEpMemFree(run.group, (char*)rows - info.offset), ncclRemoteError);
    const char byte = 1;
    ep_upload(rows, &byte, 1);
    expect_context_usable(self);
    meet(self, kNoticed, survivors(self));
    expect_victim_named(self);
    close_work(self, &run);
    ref_mapped_close();
    abort_and_go_on(self);
}

DEATH_CASE(dies_in_mapped_dispatches, kVictimDies) { lose_in_mapped(self, false); }

DEATH_CASE(dies_in_mapped_combines, kVictimDies) { lose_in_mapped(self, true); }
