// Operations and handles that were enqueued before their group's failure was known run behind it. None of them sends or
// writes anything, neither on the rank that failed nor on one that heard of it.
#define _GNU_SOURCE  // setenv, usleep
#include <stdlib.h>
#include <unistd.h>

#include "harness/nodes.h"
#include "reference/run.h"
#include "reference/mapped.h"

enum { kHidden = 32, kLocalExperts = 2, kTokens = 12 };

typedef enum { kDispatchBehind, kCombineBehind, kHandleBehind } Behind;

typedef struct {
    EpEnv* env;
    RefRun run;
    RefBuffer ids, counter;  // of a handle that is created behind the failure
    ncclEpHandle_t handle;
} Fixture;

// All tokens go to rank 0: the other ranks receive nothing, so a failure there makes none of them wait.
static void open_fixture(Fixture* fixture, EpEnv* env) {
    const RefShape shape = {kLocalExperts * (unsigned)env->size, kTokens, 2, ncclBfloat16, kHidden};
    fixture->env = env;
    fixture->run = ref_run_open_with(env, NULL, &shape, kRefOneExpert, false, ref_ht(8));
    const int64_t id = env->rank * kLocalExperts;
    fixture->ids = ref_buffer_new(sizeof(id));
    ref_buffer_upload(&fixture->ids, &id);
    fixture->counter = ref_buffer_new(kLocalExperts * sizeof(int32_t));
    fixture->handle = NULL;
    ref_prepare(&fixture->run);
}

static ncclResult_t go_on(Fixture* fixture, Behind behind) {
    const cudaStream_t stream = fixture->env->stream;
    if (behind == kDispatchBehind) return ref_launch_dispatch(&fixture->run, kRefWhole, stream);
    if (behind == kCombineBehind) return ref_launch_combine(&fixture->run, kRefBackward, stream);
    EpView ids, counter;
    ep_view_2d(&ids, ref_buffer_data(&fixture->ids), ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, 1, 1);
    ep_view_1d(&counter, ref_buffer_data(&fixture->counter), ncclInt32,
               NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, kLocalExperts);
    ncclNDTensor_t* locals[] = {&counter.tensor};
    return ncclEpCreateHandle(&fixture->handle, fixture->run.group, &ids.tensor, locals, 1, NULL, stream, false);
}

static void check_poison(const RefBuffer* buffer) {
    EP_SCOPED void* poison = ref_host_poison(buffer->bytes);
    REF_CHECK_BUFFER(buffer, poison);
}

// No rank was notified of a token.
static void check_nothing_counted(const Fixture* fixture) {
    const int32_t none[kLocalExperts] = {0};
    REF_CHECK_BUFFER(&fixture->counter, none);
}

static void check_untouched(const Fixture* fixture, Behind behind) {
    check_poison(&fixture->run.tokens_out);
    check_poison(&fixture->run.ids_out);
    check_poison(&fixture->run.weights_out);
    check_poison(&fixture->run.combined);
    check_poison(&fixture->run.gradients_out);
    if (behind == kHandleBehind) check_nothing_counted(fixture);
}

// Rank 0 has no room for what it receives, and continues before it knows.
static void fail_and_go_on(Fixture* fixture, Behind behind) {
    EpEnv* env = fixture->env;
    RefRun* run = &fixture->run;
    EpGate gate;
    const unsigned rows = run->num_rows;
    ep_gate_close(&gate, env->stream);
    run->num_rows = run->received - 1;
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefCached, env->stream));
    run->num_rows = rows;
    EP_CHECK_NCCL(go_on(fixture, behind));
    ep_gate_open(&gate);
    ep_sync(env);
    EP_CHECK_RESULT(ep_group_state(fixture->run.group), ncclInvalidUsage);
}

// The others did their part of that operation earlier and hear of the failure when they start the next.
static void go_on_unknowing(Fixture* fixture, Behind behind) {
    EP_CHECK_NCCL(go_on(fixture, behind));
    ep_sync(fixture->env);
    EP_CHECK_RESULT(ep_group_state(fixture->run.group), ncclRemoteError);
    EP_CHECK_STR_CONTAINS(ncclEpGetLastError(), "rank 0 failed: rank ");
}

static void behind_a_failure(EpEnv* env, Behind behind) {
    Fixture fixture;
    open_fixture(&fixture, env);
    if (env->rank != 0) {
        EP_CHECK_NCCL(ref_launch_dispatch(&fixture.run, kRefCached, env->stream));
        ep_sync(env);
        ref_prepare_dispatch(&fixture.run);
    }
    ep_barrier();
    if (env->rank == 0) fail_and_go_on(&fixture, behind);
    ep_barrier();
    if (env->rank != 0) go_on_unknowing(&fixture, behind);
    check_untouched(&fixture, behind);
    if (fixture.handle != NULL) EP_CHECK_NCCL(ncclEpHandleDestroy(fixture.handle));
    ref_buffer_free(&fixture.counter);
    ref_buffer_free(&fixture.ids);
    ref_run_close(&fixture.run);
}

// A block that counts tokens begins when the exchange of its handle has been given up, as rank 0 takes no part.
EP_TEST(ht_a_late_block_behind_a_failure) {
    enum { kManyTokens = 400, kTopK = 2, kGivingUpMicroseconds = 200000 };
    if (env->size == 1 || ep_num_nodes() > 1 || !ep_hold_block(0)) {
        ep_skip("only the CPU build can hold up a block, and only another rank waits for it");
        return;
    }
    ep_release_block();
    const RefShape shape = {kLocalExperts * (unsigned)env->size, kManyTokens, kTopK, ncclBfloat16, kHidden};
    EP_CHECK(setenv("NCCL_EP_TIMEOUT_MS", "2000", 1) == 0);
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape);
    EP_CHECK(unsetenv("NCCL_EP_TIMEOUT_MS") == 0);
    RefBuffer ids = ref_buffer_new(kManyTokens * kTopK * sizeof(int64_t));
    EP_CHECK_CUDA(cudaMemset(ref_buffer_data(&ids), 0, ids.bytes));
    ep_sync(env);
    ep_barrier();
    if (env->rank != 0) {
        ncclEpHandle_t handle = NULL;
        ncclResult_t state = ncclSuccess;
        (void)ep_hold_block(0);
        EP_CHECK_NCCL(ep_handle_create(&handle, group, ref_buffer_data(&ids), kManyTokens, kTopK, env->stream));
        while (state == ncclSuccess && ncclEpGetAsyncError(group, &state) == ncclSuccess) usleep(1000);
        usleep(kGivingUpMicroseconds);
        ep_release_block();
        ep_sync(env);
        EP_CHECK_RESULT(state, ncclRemoteError);
        EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    }
    ep_barrier();
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
    ref_buffer_free(&ids);
}

EP_TEST(ht_nothing_runs_behind_a_failure) {
    if (ep_on_host_backend()) {
        ep_skip("on the CPU backend nothing is enqueued that is not known");
        return;
    }
    if (ep_num_nodes() > 1 || ref_mapped_is_wanted()) {
        ep_skip("on several nodes, and with memory that peers map, no rank is through before the others have begun");
        return;
    }
    behind_a_failure(env, kDispatchBehind);
    behind_a_failure(env, kCombineBehind);
    behind_a_failure(env, kHandleBehind);
}
