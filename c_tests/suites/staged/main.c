// Staged low-latency operations: one call sends, ncclEpComplete receives, with other work in
// between. Two may be in flight, and a handle may be destroyed while one is pending.
#define _DEFAULT_SOURCE  // usleep
#include <unistd.h>

#include "reference/run.h"

// Some handles of one group, no two with the same data. The group is the first one's.
enum { kMaxRuns = 4 };
typedef struct {
    RefRun runs[kMaxRuns];
    cudaStream_t other;  // a second stream without implicit order
} Setup;

static RefRun open_run(const EpEnv* env, ncclEpGroup_t group) {
    static unsigned opened;
    const RefShape shape = {2 * (unsigned)env->size, 12, 3, ncclBfloat16, 40};
    const unsigned n = opened++;
    RefRun run = ref_run_open_with(env, group, &shape, n % 2 == 0 ? kRefMessy : kRefDistinct, n % 3 != 0,
                                   ref_ll(1000 + 1000 * (uint64_t)n));
    run.variation = n;
    return run;
}

static Setup set_up(EpEnv* env) {
    Setup setup;
    for (unsigned r = 0; r < kMaxRuns; ++r) setup.runs[r] = open_run(env, r == 0 ? NULL : setup.runs[0].group);
    EP_REQUIRE_CUDA(cudaStreamCreateWithFlags(&setup.other, cudaStreamNonBlocking));
    return setup;
}

static void tear_down(Setup* setup) {
    ref_runs_close(setup->runs, kMaxRuns);
    EP_CHECK_CUDA(cudaStreamDestroy(setup->other));
}

// A case with a `setup`.
#define STAGED_TEST(name) EP_TEST_WITH(EP_TEST, name, Setup, setup, set_up, tear_down)

static void send_dispatch(RefRun* run) {
    ref_prepare_dispatch(run);
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefStaged, run->env->stream));
}

static void send_combine(RefRun* run) {
    ref_prepare_combine(run);
    EP_CHECK_NCCL(ref_launch_combine(run, kRefStaged, run->env->stream));
}

// Completes and waits.
static void complete(RefRun* run, cudaStream_t stream) {
    static unsigned calls;
    ncclEpCompleteConfig_t config = {0};
    EP_CHECK_NCCL(ncclEpComplete(run->handle, ++calls % 2 == 0 ? NULL : &config, stream));
    EP_CHECK_CUDA(cudaStreamSynchronize(stream));
}

static void complete_dispatch(RefRun* run, cudaStream_t stream) {
    complete(run, stream);
    ref_check_dispatch(run);
}

static void complete_combine(RefRun* run, cudaStream_t stream) {
    complete(run, stream);
    ref_check_combine(run);
}

static void sleep_a_while(void* unused) {
    (void)unused;
    usleep(4000);
}

// On one rank the send phase is stuck behind other work of its stream, which still writes to the
// output, while Complete already runs on another stream.
STAGED_TEST(completed_before_the_send_began) {
    RefRun* run = &setup->runs[0];
    for (unsigned i = 0; i < 2 * (unsigned)env->size; ++i) {
        const bool combine = i % 2 != 0;
        const RefBuffer* out = combine ? &run->combined : &run->tokens_out;
        combine ? ref_prepare_combine(run) : ref_prepare_dispatch(run);
        EP_CHECK_CUDA(cudaDeviceSynchronize());
        if (env->rank == (int)(i / 2)) EP_CHECK_CUDA(cudaLaunchHostFunc(env->stream, sleep_a_while, NULL));
        EP_CHECK_CUDA(cudaMemsetAsync(ref_buffer_data(out), kRefPoison, out->bytes, env->stream));
        EP_CHECK_NCCL((combine ? ref_launch_combine : ref_launch_dispatch)(run, kRefStaged, env->stream));
        combine ? complete_combine(run, setup->other) : complete_dispatch(run, setup->other);
    }
}

// A combine on a third stream uses what its dispatch's receive phase leaves in the handle. That
// phase is stuck behind other work until the combine has had time to run ahead.
STAGED_TEST(combined_while_the_receive_is_late) {
    RefRun* run = &setup->runs[0];
    cudaStream_t third;
    EP_REQUIRE_CUDA(cudaStreamCreateWithFlags(&third, cudaStreamNonBlocking));
    for (unsigned i = 0; i < 4; ++i) {
        const bool stage = i % 2 != 0;
        EpGate gate;
        if (i > 0) ref_run_change(run, kRefReplace);
        send_dispatch(run);
        ref_prepare_combine(run);
        ep_gate_close(&gate, setup->other);
        EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, setup->other));
        EP_CHECK_NCCL(ref_launch_combine(run, stage ? kRefStaged : kRefWhole, third));
        usleep(30000);
        ep_gate_open(&gate);
        if (stage) EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, env->stream));
        EP_CHECK_CUDA(cudaDeviceSynchronize());
        ref_check(run);
    }
    EP_CHECK_CUDA(cudaStreamDestroy(third));
}

// A second Complete, or one without any staged operation, succeeds and changes nothing.
STAGED_TEST(completed_twice) {
    RefRun* run = &setup->runs[0];
    complete(run, env->stream);
    send_dispatch(run);
    complete_dispatch(run, env->stream);
    complete_dispatch(run, setup->other);
    send_combine(run);
    complete_combine(run, env->stream);
    complete_combine(run, env->stream);
    ref_check_dispatch(run);
}

// The schedule of two micro-batches: while one is computed on, the other travels.
STAGED_TEST(overlapping_micro_batches) {
    RefRun* a = &setup->runs[0];
    RefRun* b = &setup->runs[1];
    send_dispatch(a);
    for (unsigned i = 0; i < 5; ++i) {
        send_dispatch(b);
        complete_dispatch(a, env->stream);
        send_combine(a);
        complete_dispatch(b, env->stream);
        send_combine(b);
        complete_combine(a, env->stream);
        send_dispatch(a);
        complete_combine(b, env->stream);
    }
    complete_dispatch(a, env->stream);
}

STAGED_TEST(inputs_overwritten_after_sending) {
    RefRun* run = &setup->runs[0];
    for (unsigned i = 0; i < 4; ++i) {
        send_dispatch(run);
        ep_sync(env);
        ref_overwrite_inputs(run);
        complete_dispatch(run, setup->other);
        send_combine(run);
        ep_sync(env);
        ref_overwrite_inputs(run);
        complete_combine(run, env->stream);
    }
}

// ---- Endings: in which order, and when their handle is destroyed first --------------------------

// Destroying a handle abandons its pending operation: its slot is free again, its peers continue,
// and operations of other handles are right.
EP_TEST(handle_destroyed_while_pending) {
    enum { kRounds = 25 };
    Setup setup = set_up(env);
    RefRun* runs = setup.runs;
    for (unsigned i = 0; i < kRounds; ++i) {
        RefRun given_up = open_run(env, runs[0].group);
        send_dispatch(&given_up);
        if (i % 3 == 1) {
            complete_dispatch(&given_up, env->stream);
            send_combine(&given_up);
        }
        if (i % 4 == 2) send_dispatch(&runs[0]);
        EP_CHECK_NCCL(ep_handle_destroy(&given_up.handle));
        ep_sync(env);
        ref_run_close(&given_up);
        if (i % 4 == 2) complete_dispatch(&runs[0], env->stream);
        if (i % 5 == 0) ref_pair(&runs[1]);
    }
    for (unsigned pair = 0; pair < 10; ++pair) ref_pair(&runs[2]);
    send_dispatch(&runs[3]);  // tear_down abandons this one and destroys the group at once
    tear_down(&setup);
}

// One rank abandons what the others complete. They receive everything, as that rank had sent its part.
STAGED_TEST(handle_destroyed_on_one_rank) {
    enum { kRounds = 12 };
    for (unsigned i = 0; i < kRounds; ++i) {
        const bool combine = i % 3 == 2;
        RefRun run = open_run(env, setup->runs[0].group);
        if (combine) ref_dispatch(&run);
        combine ? send_combine(&run) : send_dispatch(&run);
        if (env->rank == (int)(i % (unsigned)env->size)) {
            EP_CHECK_NCCL(ep_handle_destroy(&run.handle));
            ep_sync(env);
        } else {
            combine ? complete_combine(&run, setup->other) : complete_dispatch(&run, setup->other);
        }
        ref_run_close(&run);
        for (unsigned r = 0; r < i % 4; ++r) ref_dispatch(&setup->runs[r]);
    }
}

// Each rank may complete or abandon operations in its own order.
STAGED_TEST(ended_in_another_order) {
    enum { kRounds = 8 };
    RefRun* first = &setup->runs[0];
    RefRun* second = &setup->runs[1];
    for (unsigned i = 0; i < kRounds; ++i) {
        const bool swaps = env->rank == (int)(i % (unsigned)env->size);
        send_dispatch(first);
        send_dispatch(second);
        complete_dispatch(swaps ? second : first, env->stream);
        complete_dispatch(swaps ? first : second, setup->other);
        REF_SCOPED RefRun given_up = open_run(env, setup->runs[0].group);
        send_dispatch(&given_up);
        if (!swaps) send_dispatch(first);
        EP_CHECK_NCCL(ep_handle_destroy(&given_up.handle));
        if (swaps) send_dispatch(first);
        complete_dispatch(first, env->stream);
    }
}

// One operation may stay in flight while others start and end.
STAGED_TEST(one_stays_in_flight) {
    RefRun* runs = setup->runs;
    for (unsigned i = 0; i < 4; ++i) {
        send_dispatch(&runs[0]);
        for (unsigned r = 1; r < kMaxRuns; ++r) {
            send_dispatch(&runs[r]);
            complete_dispatch(&runs[r], i % 2 == 0 ? env->stream : setup->other);
        }
        complete_dispatch(&runs[0], env->stream);
    }
}
