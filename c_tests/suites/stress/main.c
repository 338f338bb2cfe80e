// Thousands of low-latency operations of two groups with several handles each, back to back:
// blocking and staged ones in random order, random sizes, and ranks that are late at random.
//
//   test_stress [--ops N] [--every N] [--seed N]
//
// --ops operations in all (400), compared after every --every (40). The seed (1) determines all.
#define _GNU_SOURCE  // usleep
#include <unistd.h>

#include "reference/run.h"

enum { kGroups = 2, kHandles = 3, kMostPending = 2 };

// The operation that is pending on a handle, or that it has run in a batch.
typedef enum { kNothing, kDispatch, kCombine } Operation;

typedef struct {
    RefRun run;
    Operation pending;  // staged, and not completed yet
    bool combined;      // in this batch
} StressHandle;

typedef struct {
    ncclEpGroup_t group;
    RefShape shape;
    StressHandle handles[kHandles];
    unsigned num_pending;
} StressGroup;

typedef struct {
    const EpEnv* env;
    uint64_t plan;    // the same random numbers on every rank
    uint64_t delays;  // different ones on every rank
    StressGroup groups[kGroups];
} Stress;

// ---- One batch: fresh data for all handles, then operations in random order back to back, then the comparison. All handles
// have different data, so a stale row of another operation in the same buffer shows.

enum { kShortDelayUs = 300, kLongDelayUs = 20000, kShortDelayEvery = 16, kLongDelayEvery = 600 };

// Copies of the outputs of all operations of a batch, in device memory.
typedef struct {
    const StressHandle* handle;
    Operation operation;
    unsigned char* copy;  // the buffers with their guard zones, one after the other
} Snapshot;

typedef struct {
    Snapshot* items;
    unsigned count;
    unsigned most;
    unsigned char* memory;
    size_t used;
} History;

static size_t guarded(const RefBuffer* buffer) { return buffer->bytes + 2 * kRefGuardBytes; }

static size_t snapshot_bytes(const StressHandle* handle) {
    const RefRun* run = &handle->run;
    const size_t dispatched = guarded(&run->tokens_out) + guarded(&run->counter);
    const size_t combined = guarded(&run->combined);
    return dispatched > combined ? dispatched : combined;
}

static void open_history(History* history, const Stress* stress, unsigned most) {
    size_t largest = 0;
    for (unsigned i = 0; i < kGroups * kHandles; ++i) {
        const size_t bytes = snapshot_bytes(&stress->groups[i / kHandles].handles[i % kHandles]);
        if (bytes > largest) largest = bytes;
    }
    history->items = ref_host_new(most * sizeof(*history->items));
    history->memory = ep_device_alloc(most * largest);
    history->count = 0;
    history->most = most;
    history->used = 0;
}

// Moves an output into the history and leaves poison behind, both in the order of the stream.
static void move_output(History* history, const RefBuffer* buffer, cudaStream_t stream) {
    unsigned char* to = history->memory + history->used;
    EP_REQUIRE_CUDA(cudaMemcpyAsync(to, buffer->base, guarded(buffer), cudaMemcpyDeviceToDevice, stream));
    EP_REQUIRE_CUDA(cudaMemsetAsync(buffer->base, kRefPoison, guarded(buffer), stream));
    history->used += guarded(buffer);
}

static void take_snapshot(History* history, const StressHandle* handle, Operation operation, cudaStream_t stream) {
    EP_REQUIRE(history->count < history->most);
    Snapshot* item = &history->items[history->count++];
    item->handle = handle;
    item->operation = operation;
    item->copy = history->memory + history->used;
    if (operation == kDispatch) {
        move_output(history, &handle->run.tokens_out, stream);
        move_output(history, &handle->run.counter, stream);
    } else {
        move_output(history, &handle->run.combined, stream);
    }
}

static void check_and_close_history(History* history) {
    for (unsigned i = 0; i < history->count; ++i) {
        const Snapshot* item = &history->items[i];
        RefRun seen = item->handle->run;  // its state then: the outputs are those of the snapshot
        if (item->operation == kDispatch) {
            seen.tokens_out.base = item->copy;
            seen.counter.base = item->copy + guarded(&seen.tokens_out);
            ref_check_dispatch(&seen);
        } else {
            seen.combined.base = item->copy;
            ref_check_combine(&seen);
        }
    }
    ep_device_free(history->memory);
    free(history->items);
}

// ---- Operations --------------------------------------------------------------------------------

// Delays each rank now and then, at different times.
static void delay(Stress* stress) {
    if (ep_random_below(&stress->delays, kLongDelayEvery) == 0) usleep(kLongDelayUs);
    if (ep_random_below(&stress->delays, kShortDelayEvery) == 0) {
        usleep((useconds_t)ep_random_below(&stress->delays, kShortDelayUs));
    }
}

static void done(const Stress* stress, StressHandle* handle, Operation operation, History* history) {
    if (operation == kCombine) handle->combined = true;
    if (history != NULL) take_snapshot(history, handle, operation, stress->env->stream);
}

static void complete(const Stress* stress, StressGroup* group, StressHandle* handle, History* history) {
    EP_CHECK_NCCL(ncclEpComplete(handle->run.handle, NULL, stress->env->stream));
    done(stress, handle, handle->pending, history);
    handle->pending = kNothing;
    --group->num_pending;
}

static void next_operation(Stress* stress, StressGroup* group, StressHandle* handle, History* history) {
    const Operation operation = ep_random_below(&stress->plan, 2) == 0 ? kDispatch : kCombine;
    const bool wants_staged = ep_random_below(&stress->plan, 2) == 0;
    const bool staged = wants_staged && group->num_pending < kMostPending;
    const cudaStream_t stream = stress->env->stream;
    if (operation == kDispatch) {
        EP_CHECK_NCCL(ref_launch_dispatch(&handle->run, staged ? kRefStaged : kRefWhole, stream));
    } else {
        EP_CHECK_NCCL(ref_launch_combine(&handle->run, staged ? kRefStaged : kRefWhole, stream));
    }
    if (staged) {
        handle->pending = operation;
        ++group->num_pending;
    } else {
        done(stress, handle, operation, history);
    }
}

// New data, sometimes with a new routing; every handle has dispatched once afterwards.
static void renew(Stress* stress, StressGroup* group, StressHandle* handle) {
    RefRun* run = &handle->run;
    if (ep_random_below(&stress->plan, 2) == 0) {
        const RefStyle style = (RefStyle)ep_random_below(&stress->plan, kRefNumStyles);
        ref_run_give(run, ref_routing_new((unsigned)stress->env->size, group->shape.num_experts, group->shape.top_k,
                                            run->now->num_tokens, style, ep_random(&stress->plan)));
    }
    ref_prepare_dispatch(run);
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, stress->env->stream));
    ref_prepare_combine(run);
    handle->combined = false;
}

static void check_last_outputs(const StressGroup* group) {
    for (unsigned h = 0; h < kHandles; ++h) {
        const StressHandle* handle = &group->handles[h];
        RefRun seen = handle->run;
        ref_check_dispatch(&seen);
        if (handle->combined) ref_check_combine(&seen);
    }
}

// Launches at least `num_ops` operations back to back, then compares. With `snapshots` the output of every single
// operation is copied on the stream and compared, otherwise the last ones are. Returns the number of operations.
static unsigned stress_batch(Stress* stress, unsigned num_ops, bool snapshots) {
    for (unsigned i = 0; i < kGroups * kHandles; ++i) {
        StressGroup* group = &stress->groups[i / kHandles];
        renew(stress, group, &group->handles[i % kHandles]);
    }
    History history;
    if (snapshots) open_history(&history, stress, num_ops + kGroups * kMostPending);
    for (unsigned i = 0; i < num_ops; ++i) {
        StressGroup* group = &stress->groups[ep_random_below(&stress->plan, kGroups)];
        StressHandle* handle = &group->handles[ep_random_below(&stress->plan, kHandles)];
        delay(stress);
        if (handle->pending != kNothing) {
            complete(stress, group, handle, snapshots ? &history : NULL);
        } else {
            next_operation(stress, group, handle, snapshots ? &history : NULL);
        }
    }
    for (unsigned i = 0; i < kGroups * kHandles; ++i) {
        StressGroup* group = &stress->groups[i / kHandles];
        StressHandle* handle = &group->handles[i % kHandles];
        if (handle->pending == kNothing) continue;
        complete(stress, group, handle, snapshots ? &history : NULL);
    }
    ep_sync(stress->env);
    if (snapshots) check_and_close_history(&history);
    for (unsigned g = 0; g < kGroups; ++g) {
        if (!snapshots) check_last_outputs(&stress->groups[g]);
        EP_CHECK_NCCL(ep_group_state(stress->groups[g].group));
    }
    return num_ops + kGroups * kHandles;
}

// ---- The program ---------------------------------------------------------------------------------

enum { kDefaultOps = 400, kDefaultEvery = 40, kBatchesPerRound = 6 };
enum { kMaxTokens = 24, kMaxTopK = 6, kMaxLocalExperts = 3, kMaxRowUnits = 32, kRowUnit = 16 };

typedef struct {
    unsigned num_ops, every, seed;
} Options;

static unsigned from_one_to(Stress* stress, unsigned most) {
    return 1 + (unsigned)ep_random_below(&stress->plan, most);
}

static RefShape random_shape(Stress* stress) {
    static const ncclDataType_t kTypes[] = {ncclBfloat16, ncclFloat16, ncclFloat32};
    RefShape shape;
    shape.num_experts = from_one_to(stress, kMaxLocalExperts) * (unsigned)stress->env->size;
    shape.max_tokens = from_one_to(stress, kMaxTokens);
    shape.top_k = from_one_to(stress, kMaxTopK);
    shape.datatype = kTypes[ep_random_below(&stress->plan, 3)];
    shape.hidden = kRowUnit * from_one_to(stress, kMaxRowUnits) / (unsigned)ep_datatype_size(shape.datatype);
    return shape;
}

static void open_group(Stress* stress, StressGroup* group) {
    memset(group, 0, sizeof(*group));
    group->shape = random_shape(stress);
    group->group = ref_group_new(stress->env, NCCL_EP_ALGO_LOW_LATENCY, &group->shape);
    for (unsigned h = 0; h < kHandles; ++h) {
        const RefStyle style = (RefStyle)ep_random_below(&stress->plan, kRefNumStyles);
        const bool uneven = ep_random_below(&stress->plan, 2) == 0;
        group->handles[h].run = ref_run_open_with(stress->env, group->group, &group->shape, style, uneven,
                                                  ref_ll(ep_random(&stress->plan)));
    }
}

static void close_group(Stress* stress, StressGroup* group) {
    for (unsigned h = 0; h < kHandles; ++h) ref_run_close(&group->handles[h].run);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group->group, stress->env->stream));
}

static void run(const EpEnv* env, const Options* options) {
    Stress stress;
    memset(&stress, 0, sizeof(stress));
    stress.env = env;
    stress.plan = options->seed;
    stress.delays = ep_mix(options->seed, (uint64_t)env->rank, 1);
    uint64_t done = 0;
    while (done < options->num_ops) {
        for (unsigned g = 0; g < kGroups; ++g) open_group(&stress, &stress.groups[g]);
        for (unsigned i = 0; i < kBatchesPerRound && done < options->num_ops; ++i) {
            done += stress_batch(&stress, options->every, i % 2 == 0);
        }
        for (unsigned g = 0; g < kGroups; ++g) close_group(&stress, &stress.groups[g]);
    }
    if (env->rank == 0) printf("%llu operations\n", (unsigned long long)done);
}

int main(int argc, char** argv) {
    EpEnv env;
    ep_init(&env, &argc, &argv);
    Options options = {kDefaultOps, kDefaultEvery, 1};
    const EpOption table[] = {
        {"--ops", &options.num_ops, NULL}, {"--every", &options.every, NULL}, {"--seed", &options.seed, NULL}};
    const bool good = ep_read_options(argc, argv, table, COUNT(table), NULL);
    if (!good || options.every == 0 || options.every > 100000) {
        if (env.rank == 0) fprintf(stderr, "usage: test_stress [--ops N] [--every N] [--seed N]\n");
        ep_release(&env);
        return 2;
    }
    run(&env, &options);
    return ep_finish(&env);
}
