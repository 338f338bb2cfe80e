// How objects end: what they leave behind, what their end waits for, what keeps their memory.
#define _GNU_SOURCE  // usleep
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "harness/graphs.h"
#include "reference/run.h"
#include "suites/memory/memory.h"

enum { kBytes = (2 << 20) + 4096, kTimes = 2 };

// Of this process alone on the stand-ins; other processes of a GPU use it, too.
static size_t free_bytes(void) { return ep_on_hostsim() ? ep_free_bytes() : 0; }

static void make_and_end(const EpEnv* env, bool frees) {
    ncclEpGroup_t group = open_group(env);
    uint8_t* given = ep_device_alloc(kBytes);
    uint8_t* memory[] = {new_memory(group, kBytes), new_memory(group, 2 * kBytes)};
    EP_CHECK_NCCL(ncclEpMemRegister(group, given, kBytes, NULL));
    fill(env, memory[1], kBytes, 70);
    check_peers(env, group, memory[1], 70);
    if (frees) {
        EP_CHECK_NCCL(ncclEpMemFree(group, memory[1]));
        EP_CHECK_NCCL(ncclEpMemDeregister(group, given));
        EP_CHECK_NCCL(ncclEpMemFree(group, memory[0]));
    }
    close_group(env, group);
    ep_device_free(given);
}

// Nothing is left of objects, whether they end or their group does.
EP_TEST(memory_is_freed) {
    for (int frees = 0; frees < 2; ++frees) {
        // Over several nodes the second group finds what the first has kept, and keeps more.
        for (int i = 0; i < 2; ++i) make_and_end(env, frees);
        ep_barrier();
        const size_t before = free_bytes();
        const int descriptors = ep_open_descriptors();
        for (int i = 0; i < kTimes; ++i) make_and_end(env, frees);
        ep_barrier();
        EP_CHECK_EQ_U64(free_bytes(), before);
        EP_CHECK_EQ_I64(ep_open_descriptors(), descriptors);
    }
}

GROUP_TEST(freed_memory_is_given_back_at_once) {
    EP_CHECK_NCCL(ncclEpMemFree(group, new_memory(group, kBytes)));
    ep_barrier();
    const size_t before = free_bytes();
    uint8_t* memory = new_memory(group, kBytes);
    if (ep_on_hostsim()) EP_CHECK(free_bytes() + kBytes <= before);
    EP_CHECK_NCCL(ncclEpMemFree(group, memory));
    ep_barrier();
    EP_CHECK_EQ_U64(free_bytes(), before);
}

typedef struct {
    EpGate gate;
    atomic_bool is_open;
} Held;

static void* open_late(void* argument) {
    enum { kHeldUs = 250000 };  // longer than an unmapping waits for a quiescent device
    Held* held = argument;
    usleep(kHeldUs);
    atomic_store(&held->is_open, true);
    ep_gate_open(&held->gate);
    return NULL;
}

static const RefShape kShape = {.hidden = 64, .top_k = 2, .max_tokens = 5};

static RefShape shape_of(const EpEnv* env) {
    RefShape shape = kShape;
    shape.num_experts = 2 * (unsigned)env->size;
    return shape;
}

// An object ends behind the operations of its group, whatever stream these are on.
EP_TEST(memory_outlives_operations) {
    const RefShape shape = shape_of(env);
    REF_SCOPED RefRun run = ref_run_open_with(env, NULL, &shape, kRefDistinct, true, ref_ll(1));
    uint8_t* memory = new_memory(run.group, kBytes);
    ref_prepare_dispatch(&run);
    Held held = {.is_open = false};
    ep_gate_close(&held.gate, env->stream);
    EP_CHECK_NCCL(ref_launch_dispatch(&run, kRefWhole, env->stream));
    pthread_t opener;
    EP_REQUIRE(pthread_create(&opener, NULL, open_late, &held) == 0);
    EP_CHECK_NCCL(ncclEpMemFree(run.group, memory));
    EP_CHECK(atomic_load(&held.is_open));
    EP_REQUIRE(pthread_join(opener, NULL) == 0);
    ep_sync(env);
}

// While graphs have operations of any group, nothing is unmapped: the memory is kept, and serves again.
EP_TEST(graphs_keep_memory) {
    const RefShape shape = shape_of(env);
    REF_SCOPED RefRun run = ref_run_open_with(env, NULL, &shape, kRefDistinct, true, ref_ll(2));
    ref_prepare_dispatch(&run);
    const EpCaptured captured = ep_capture(env->stream, ref_play_dispatch, &run);
    if (captured.executable != NULL) {
        ncclEpGroup_t group = open_group(env);
        uint8_t* memory = new_memory(group, kBytes);
        EP_CHECK_NCCL(ncclEpMemFree(group, memory));
        EP_CHECK_EQ_I64(object_at(group, memory), -1);
        EP_CHECK(new_memory(group, kBytes) == memory);
        fill(env, memory, kBytes, 80);
        check_peers(env, group, memory, 80);
        // A caller's memory may be gone when others come to unmap it; what takes its place is other memory.
        for (uint64_t seed = 81; seed < 84; ++seed) {
            uint8_t* given = ep_device_alloc(kBytes);
            EP_CHECK_NCCL(ncclEpMemRegister(group, given, kBytes, NULL));
            fill(env, given, kBytes, seed);
            check_peers(env, group, given, seed);
            EP_CHECK_NCCL(ncclEpMemDeregister(group, given));
            ep_device_free(given);
        }
        ep_replay(&captured);
        ep_sync(env);
        close_group(env, group);
    }
    ep_release_captured(&captured);
}
