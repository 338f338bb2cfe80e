// One batch: fresh data for all handles, then operations in random order back to back, then the comparison. All handles
// have different data, so a stale row of another operation in the same buffer shows.
#define _GNU_SOURCE  // usleep
#include <unistd.h>

#include "suites/stress/stress.h"

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

unsigned stress_batch(Stress* stress, unsigned num_ops, bool snapshots) {
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
