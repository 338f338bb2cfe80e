// Staged low-latency operations: sent by one call, received by ncclEpComplete, with other work in
// between. Two may be in flight; a third, or another operation on a handle with one, is refused; a
// handle may go while one is pending.
#define _DEFAULT_SOURCE  // usleep
#include <unistd.h>

#include "reference/ll_run.h"

static LlShape small_shape(const EpEnv* env) {
    const LlShape shape = {2 * (unsigned)env->size, 12, 3, ncclBfloat16, 40};
    return shape;
}

// A group and some handles on it, no two with the same data.
enum { kMaxRuns = 4 };
typedef struct {
    ncclEpGroup_t group;
    LlRun runs[kMaxRuns];
    cudaStream_t other;  // a second stream without implicit order
} Setup;

static void open_run(LlRun* run, const EpEnv* env, ncclEpGroup_t group) {
    static unsigned opened;
    const LlShape shape = small_shape(env);
    const unsigned n = opened++;
    ll_run_open_with(run, env, group, &shape, n % 2 == 0 ? kRefMessy : kRefDistinct, n % 3 != 0,
                     1000 + 1000 * (uint64_t)n);
    run->variation = n;
}

static void set_up(Setup* setup, EpEnv* env) {
    const LlShape shape = small_shape(env);
    setup->group = ll_group_new(env, &shape);
    for (unsigned r = 0; r < kMaxRuns; ++r) open_run(&setup->runs[r], env, setup->group);
    EP_REQUIRE_CUDA(cudaStreamCreateWithFlags(&setup->other, cudaStreamNonBlocking));
}

static void tear_down(Setup* setup, EpEnv* env) {
    for (unsigned r = 0; r < kMaxRuns; ++r) ll_run_close(&setup->runs[r]);
    EP_CHECK_NCCL(ncclEpGroupDestroy(setup->group, env->stream));
    EP_CHECK_CUDA(cudaStreamDestroy(setup->other));
}

static void send_dispatch(LlRun* run) {
    ll_prepare_dispatch(run);
    EP_CHECK_NCCL(ll_launch_dispatch(run, run->env->stream, true));
}

static void send_combine(LlRun* run) {
    ll_prepare_combine(run);
    EP_CHECK_NCCL(ll_launch_combine(run, run->env->stream, true));
}

static void complete(LlRun* run, cudaStream_t stream) {
    static unsigned calls;
    ncclEpCompleteConfig_t config = {0};
    EP_CHECK_NCCL(ncclEpComplete(run->handle, ++calls % 2 == 0 ? NULL : &config, stream));
    EP_CHECK_CUDA(cudaStreamSynchronize(stream));
}

static void complete_dispatch(LlRun* run, cudaStream_t stream) {
    complete(run, stream);
    ll_check_dispatch(run);
}

static void complete_combine(LlRun* run, cudaStream_t stream) {
    complete(run, stream);
    ll_check_combine(run);
}

static void one_at_a_time(EpEnv* env) {
    Setup setup;
    set_up(&setup, env);
    LlRun* run = &setup.runs[0];
    for (unsigned i = 0; i < 6; ++i) {
        send_dispatch(run);
        complete_dispatch(run, env->stream);
        send_combine(run);
        complete_combine(run, env->stream);
    }
    tear_down(&setup, env);
}

// The receive phase comes after the send phase even if nothing else orders the two streams.
static void completed_on_another_stream(EpEnv* env) {
    Setup setup;
    set_up(&setup, env);
    for (unsigned i = 0; i < 6; ++i) {
        LlRun* run = &setup.runs[i % 2];
        send_dispatch(run);
        complete_dispatch(run, setup.other);
        send_combine(run);
        complete_combine(run, i % 3 == 0 ? env->stream : setup.other);
    }
    tear_down(&setup, env);
}

static void sleep_a_while(void* unused) {
    (void)unused;
    usleep(4000);
}

// On one rank the send phase is held up behind other work of its stream, which still writes to the
// output, when Complete is already running on another stream.
static void completed_before_the_send_began(EpEnv* env) {
    Setup setup;
    set_up(&setup, env);
    LlRun* run = &setup.runs[0];
    for (unsigned i = 0; i < 2 * (unsigned)env->size; ++i) {
        const bool combine = i % 2 != 0;
        const RefBuffer* out = combine ? &run->combined : &run->packed;
        combine ? ll_prepare_combine(run) : ll_prepare_dispatch(run);
        EP_CHECK_CUDA(cudaDeviceSynchronize());
        if (env->rank == (int)(i / 2)) {
            EP_CHECK_CUDA(cudaLaunchHostFunc(env->stream, sleep_a_while, NULL));
        }
        EP_CHECK_CUDA(cudaMemsetAsync(ref_buffer_data(out), kRefPoison, out->bytes, env->stream));
        EP_CHECK_NCCL(combine ? ll_launch_combine(run, env->stream, true)
                              : ll_launch_dispatch(run, env->stream, true));
        combine ? complete_combine(run, setup.other) : complete_dispatch(run, setup.other);
    }
    tear_down(&setup, env);
}

// A second Complete, and one with nothing ever staged, are successful and change nothing.
static void completed_twice(EpEnv* env) {
    Setup setup;
    set_up(&setup, env);
    LlRun* run = &setup.runs[0];
    complete(run, env->stream);
    send_dispatch(run);
    complete_dispatch(run, env->stream);
    complete_dispatch(run, setup.other);
    send_combine(run);
    complete_combine(run, env->stream);
    complete_combine(run, env->stream);
    ll_check_dispatch(run);
    tear_down(&setup, env);
}

static void two_in_flight(EpEnv* env) {
    Setup setup;
    set_up(&setup, env);
    LlRun* a = &setup.runs[0];
    LlRun* b = &setup.runs[1];
    for (unsigned i = 0; i < 4; ++i) {
        send_dispatch(a);
        send_dispatch(b);
        complete_dispatch(i % 2 == 0 ? a : b, env->stream);  // either may come first
        complete_dispatch(i % 2 == 0 ? b : a, env->stream);
        send_combine(a);
        send_combine(b);
        complete_combine(i % 2 == 0 ? b : a, env->stream);
        complete_combine(i % 2 == 0 ? a : b, env->stream);
    }
    tear_down(&setup, env);
}

// The schedule of two micro-batches: while one is computed on, the other travels.
static void overlapping_micro_batches(EpEnv* env) {
    Setup setup;
    set_up(&setup, env);
    LlRun* a = &setup.runs[0];
    LlRun* b = &setup.runs[1];
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
    tear_down(&setup, env);
}

// Two staged operations stay pending while other handles run many blocking ones.
static void blocking_operations_meanwhile(EpEnv* env) {
    enum { kPairs = 20 };
    Setup setup;
    set_up(&setup, env);
    LlRun* runs = setup.runs;
    for (unsigned i = 0; i < 3; ++i) {
        const bool combine_pending = i == 1;
        if (combine_pending) ll_dispatch(&runs[0]);
        send_dispatch(&runs[1]);
        combine_pending ? send_combine(&runs[0]) : send_dispatch(&runs[0]);
        for (unsigned pair = 0; pair < kPairs; ++pair) {
            LlRun* run = &runs[2 + pair % 2];
            ll_dispatch(run);
            ll_combine(run);
        }
        complete_dispatch(&runs[1], env->stream);
        for (unsigned pair = 0; pair < kPairs; ++pair) ll_dispatch(&runs[1 + pair % 3]);
        combine_pending ? complete_combine(&runs[0], env->stream)
                        : complete_dispatch(&runs[0], env->stream);
    }
    tear_down(&setup, env);
}

static void inputs_overwritten_after_sending(EpEnv* env) {
    Setup setup;
    set_up(&setup, env);
    LlRun* run = &setup.runs[0];
    for (unsigned i = 0; i < 4; ++i) {
        send_dispatch(run);
        ep_sync(env);
        ll_overwrite_inputs(run);
        complete_dispatch(run, setup.other);
        send_combine(run);
        ep_sync(env);
        ll_overwrite_inputs(run);
        complete_combine(run, env->stream);
    }
    tear_down(&setup, env);
}

// A refusal leaves what is pending alone, and refuses before anything is sent.
static void third_is_refused(EpEnv* env) {
    Setup setup;
    set_up(&setup, env);
    LlRun* runs = setup.runs;
    ll_dispatch(&runs[3]);
    send_dispatch(&runs[0]);
    send_dispatch(&runs[1]);
    ll_prepare_dispatch(&runs[2]);
    EP_CHECK_RESULT(ll_launch_dispatch(&runs[2], env->stream, true), ncclInvalidUsage);
    ll_prepare_combine(&runs[3]);
    EP_CHECK_RESULT(ll_launch_combine(&runs[3], env->stream, true), ncclInvalidUsage);
    EP_CHECK_NCCL(ncclEpComplete(runs[2].handle, NULL, env->stream));  // nothing is pending
    ll_dispatch(&runs[2]);
    complete_dispatch(&runs[0], env->stream);
    send_dispatch(&runs[2]);  // one place is free again
    complete_dispatch(&runs[1], env->stream);
    complete_dispatch(&runs[2], env->stream);
    tear_down(&setup, env);
}

static void second_on_a_handle_is_refused(EpEnv* env) {
    Setup setup;
    set_up(&setup, env);
    LlRun* run = &setup.runs[0];
    ll_dispatch(run);
    send_dispatch(run);
    for (unsigned send_only = 0; send_only < 2; ++send_only) {
        EP_CHECK_RESULT(ll_launch_dispatch(run, env->stream, send_only), ncclInvalidUsage);
        EP_CHECK_RESULT(ll_launch_combine(run, env->stream, send_only), ncclInvalidUsage);
    }
    complete_dispatch(run, env->stream);
    send_combine(run);
    EP_CHECK_RESULT(ll_launch_dispatch(run, env->stream, false), ncclInvalidUsage);
    EP_CHECK_RESULT(ll_launch_combine(run, env->stream, true), ncclInvalidUsage);
    complete_combine(run, env->stream);
    tear_down(&setup, env);
}

// What a destroyed handle had pending is given up: its place is free again, its peers go on, and
// operations of other handles are right.
static void handle_destroyed_while_pending(EpEnv* env) {
    enum { kRounds = 25 };
    Setup setup;
    set_up(&setup, env);
    LlRun* runs = setup.runs;
    for (unsigned i = 0; i < kRounds; ++i) {
        LlRun given_up;
        open_run(&given_up, env, setup.group);
        send_dispatch(&given_up);
        if (i % 3 == 1) {
            complete_dispatch(&given_up, env->stream);
            send_combine(&given_up);
        }
        if (i % 4 == 2) send_dispatch(&runs[0]);
        EP_CHECK_NCCL(ncclEpHandleDestroy(given_up.handle));
        given_up.handle = NULL;
        ep_sync(env);
        ll_run_close(&given_up);
        if (i % 4 == 2) complete_dispatch(&runs[0], env->stream);
        if (i % 5 == 0) {
            ll_dispatch(&runs[1]);
            ll_combine(&runs[1]);
        }
    }
    for (unsigned pair = 0; pair < 10; ++pair) {
        ll_dispatch(&runs[2]);
        ll_combine(&runs[2]);
    }
    send_dispatch(&runs[3]);  // tear_down gives up this one and destroys the group at once
    tear_down(&setup, env);
}

// One rank gives up what the others complete: they get everything, as it had sent its part.
static void handle_destroyed_on_one_rank(EpEnv* env) {
    enum { kRounds = 12 };
    Setup setup;
    set_up(&setup, env);
    for (unsigned i = 0; i < kRounds; ++i) {
        const bool combine = i % 3 == 2;
        LlRun run;
        open_run(&run, env, setup.group);
        if (combine) ll_dispatch(&run);
        combine ? send_combine(&run) : send_dispatch(&run);
        if (env->rank == (int)(i % (unsigned)env->size)) {
            EP_CHECK_NCCL(ncclEpHandleDestroy(run.handle));
            run.handle = NULL;
            ep_sync(env);
        } else {
            combine ? complete_combine(&run, setup.other) : complete_dispatch(&run, setup.other);
        }
        ll_run_close(&run);
        for (unsigned r = 0; r < i % 4; ++r) ll_dispatch(&setup.runs[r]);
    }
    tear_down(&setup, env);
}

// One rank after the other is late, in sending or in receiving.
static void late_ranks(EpEnv* env) {
    enum { kRounds = 24, kLateMicroseconds = 3000 };
    Setup setup;
    set_up(&setup, env);
    LlRun* a = &setup.runs[0];
    LlRun* b = &setup.runs[1];
    uint64_t own = 77 + (uint64_t)env->rank;
    for (unsigned i = 0; i < kRounds; ++i) {
        const bool late = env->rank == (int)(i % (unsigned)env->size);
        if (late) usleep(kLateMicroseconds);
        send_dispatch(a);
        usleep((useconds_t)ep_random_below(&own, 500));
        ll_dispatch(b);
        if (late) usleep(kLateMicroseconds);
        complete_dispatch(a, setup.other);
        send_combine(b);
        usleep((useconds_t)ep_random_below(&own, 500));
        ll_combine(a);
        if (!late) usleep(kLateMicroseconds / 10);
        complete_combine(b, env->stream);
    }
    tear_down(&setup, env);
}

int main(int argc, char** argv) {
    static const EpCase kCases[] = {
        EP_CASE(one_at_a_time),
        EP_CASE(completed_on_another_stream),
        EP_CASE(completed_before_the_send_began),
        EP_CASE(completed_twice),
        EP_CASE(two_in_flight),
        EP_CASE(overlapping_micro_batches),
        EP_CASE(blocking_operations_meanwhile),
        EP_CASE(inputs_overwritten_after_sending),
        EP_CASE(third_is_refused),
        EP_CASE(second_on_a_handle_is_refused),
        EP_CASE(handle_destroyed_while_pending),
        EP_CASE(handle_destroyed_on_one_rank),
        EP_CASE(late_ranks),
    };
    return ep_main(argc, argv, kCases, sizeof(kCases) / sizeof(kCases[0]));
}
