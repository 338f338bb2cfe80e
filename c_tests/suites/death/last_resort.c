// A rank is lost while the process of another one has little left to end its network with: the system gives no more
// threads, or several groups fail at once.
#define _GNU_SOURCE  // RTLD_NEXT, dladdr, usleep
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "harness/nodes.h"
#include "suites/death/work.h"

enum { kGroups = 6, kOperations = 4 };

static atomic_bool g_refuses_threads;

static bool is_called_by_library(const void* caller) {
    Dl_info info;
    return dladdr(caller, &info) != 0 && info.dli_fname != NULL && strstr(info.dli_fname, "libnccl_ep.") != NULL;
}

// Fails as at the limit of a container, for the library alone.
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
    static _Atomic(int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)) create;
    if (atomic_load(&g_refuses_threads) && is_called_by_library(__builtin_return_address(0))) return EAGAIN;
    if (atomic_load(&create) == NULL) {
        void* found = dlsym(RTLD_NEXT, "pthread_create");
        int (*next)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
        memcpy(&next, &found, sizeof(next));
        atomic_store(&create, next);
    }
    return atomic_load(&create)(thread, attributes, start, argument);
}

static void expect_end_of(const DeathRank* self, cudaStream_t stream, double since) {
    while (cudaStreamQuery(stream) == cudaErrorNotReady && in_time(self, since)) usleep(kPollUs);
    EP_CHECK(cudaStreamQuery(stream) != cudaErrorNotReady);
    (void)cudaGetLastError();
}

// What the others have sent may still complete an operation of the victim. On its node the first one fails within the
// node, and those behind it are then on the network.
static double start_operations(const DeathRank* self, RefRun* run) {
    const bool is_near = ep_node_distance((unsigned)self->env.rank, (unsigned)self->victim) == 0;
    double launched = ep_seconds();
    for (int i = 0; i < (is_near ? kOperations : 1); ++i) {
        launched = ep_seconds();
        if (ref_launch_dispatch(run, kRefWhole, self->env.stream) != ncclSuccess) break;
    }
    return launched;
}

// All ranks live, so nothing but the deadline ends the operation.
DEATH_WORK_CASE(stalls_where_no_thread_is_left, kVictimLives) {
    ref_prepare_dispatch(run);
    meet(self, kReady, self->env.size);
    if (is_victim(self)) meet(self, kNoticed, self->env.size);
    atomic_store(&g_refuses_threads, true);
    const double start = start_operations(self, run);
    expect_fault(self, run->group, start);
    expect_end_of(self, self->env.stream, start);
    atomic_store(&g_refuses_threads, false);
    if (!is_victim(self)) {
        meet(self, kNoticed, self->env.size);
        expect_victim_named(self);
    }
    finish_behind_a_stall(self, run);
}

// While its memory is freed a device takes no copy, by which it would learn of the failures.
DEATH_CASE(several_groups_lose_a_rank_while_memory_is_freed, kVictimDies) {
    allow_for_a_free(self);
    // The kernels of so many groups need not fit on a GPU together: the last begin when the first have given up.
    if (!ep_on_hostsim()) self->slack_ms += self->timeout_ms;
    RefRun runs[kGroups];
    EpEnv env[kGroups];
    for (int i = 0; i < kGroups; ++i) {
        env[i] = self->env;
        if (i > 0) EP_REQUIRE_CUDA(cudaStreamCreate(&env[i].stream));
        runs[i] = open_work(&env[i], 1);
        ref_prepare_dispatch(&runs[i]);
    }
    void* memory = ep_device_alloc(1 << 20);
    lose_victim(self);
    const double start = ep_seconds();
    for (int i = 0; i < kGroups; ++i) EP_CHECK_NCCL(ref_launch_dispatch(&runs[i], kRefWhole, env[i].stream));
    ep_device_free(memory);
    check_in_time(self, start);
    for (int i = 0; i < kGroups; ++i) expect_fault(self, runs[i].group, start);
    for (int i = 1; i < kGroups; ++i) {
        close_work(self, &runs[i]);
        EP_CHECK_CUDA(cudaStreamDestroy(env[i].stream));
    }
    finish_survivor(self, &runs[0]);
}
