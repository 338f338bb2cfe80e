// A rank dies or never joins while groups or a handle are created.
#define _GNU_SOURCE  // RTLD_NEXT, setenv, usleep
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "harness/nodes.h"
#include "suites/death/work.h"

static ncclResult_t create_group(const DeathRank* self, ncclComm_t comm, cudaStream_t stream, ncclEpGroup_t* group) {
    const RefShape shape = shape_for(&self->env);
    const ncclEpGroupConfig_t config =
        ep_group_config(NCCL_EP_ALGO_LOW_LATENCY, shape.num_experts, shape.max_tokens, 128);
    return ncclEpCreateGroup(group, comm, &config, stream, NULL, NULL);
}

// NCCL connects the ranks in a communicator's first collective and waits for them without a deadline.
static void connect_ranks(DeathRank* self, ncclComm_t comm, cudaStream_t stream) {
    ncclEpGroup_t group = NULL;
    EP_REQUIRE_NCCL(create_group(self, comm, stream, &group));
    EP_REQUIRE_NCCL(ncclEpGroupDestroy(group, stream));
}

// The creation fails within its deadline, and the text names the waiting rank.
static void expect_no_group(DeathRank* self, ncclComm_t comm, cudaStream_t stream) {
    ncclEpGroup_t group = NULL;
    const double start = ep_seconds();
    EP_CHECK_EQ_I64(create_group(self, comm, stream, &group), ncclRemoteError);
    check_in_time(self, start);
    EP_CHECK(group == NULL);
}

DEATH_CASE(dies_before_creation, kVictimDies) {
    connect_ranks(self, self->env.comm, self->env.stream);
    meet(self, kReady, self->env.size);
    if (is_victim(self)) die(self);
    expect_no_group(self, self->env.comm, self->env.stream);
    EP_CHECK_STR_CONTAINS(ep_last_error(), " waited ");
    abort_and_go_on(self);
}

// All ranks live. No rank gets a network while the environment of one fixes the ids of communicators.
DEATH_CASE(ids_of_the_network_are_fixed, kVictimLives) {
    ncclEpGroup_t group = NULL;
    if (is_victim(self)) EP_REQUIRE(setenv("NCCL_COMM_ID", "127.0.0.1:40000", 1) == 0);
    const ncclResult_t expected = is_victim(self) ? ncclInvalidUsage : ncclRemoteError;
    EP_CHECK_EQ_I64(create_group(self, self->env.comm, self->env.stream, &group), expected);
    EP_CHECK_STR_CONTAINS(ep_last_error(), "must choose the ids of communicators");
    EP_CHECK(is_victim(self) || names(ep_last_error(), self->victim));
    EP_REQUIRE(unsetenv("NCCL_COMM_ID") == 0);
    RefRun run = open_work(&self->env, 1);
    ref_run_close(&run);
    EP_CHECK_NCCL(ncclCommDestroy(self->env.comm));
    EP_CHECK_CUDA(cudaStreamDestroy(self->env.stream));
}

// Sets a deadline longer than the slack, so that waiting for two deadlines fails the check.
static void take_a_long_deadline(DeathRank* self) {
    if (self->timeout_ms >= 2 * kSlackMs) return;
    self->timeout_ms = 2 * kSlackMs;
    EP_REQUIRE(setenv("NCCL_EP_TIMEOUT_MS", "2000", 1) == 0);
}

// Memory that another thread frees while a creation is stuck.
typedef struct {
    void* memory;
    cudaStream_t stream;
    pthread_t thread;
} Freed;

// Freeing memory waits for the device, and holds up most other calls meanwhile.
static void* free_when_stuck(void* argument) {
    enum { kPauseUs = 1000, kMostMs = 500 };
    const Freed* freed = argument;
    int busy_ms = 0;
    for (int i = 0; i < kMostMs && busy_ms < kMostMs / 10; ++i) {
        usleep(kPauseUs);
        busy_ms = cudaStreamQuery(freed->stream) == cudaErrorNotReady ? busy_ms + 1 : 0;
    }
    // An exchange that was aborted may have left its error.
    (void)cudaFree(freed->memory);
    return NULL;
}

static void start_to_free(Freed* freed, cudaStream_t stream) {
    freed->memory = ep_device_alloc(1 << 20);
    freed->stream = stream;
    EP_REQUIRE(pthread_create(&freed->thread, NULL, free_when_stuck, freed) == 0);
}

// The victim stops once all ranks have mapped its window, and so misses the self test. That test fails at the deadline,
// and what follows must not wait for a second one. Only the CPU build can stop a rank at this point.
DEATH_CASE(stops_in_creation, kVictimDies) {
    connect_ranks(self, self->env.comm, self->env.stream);
    const bool stops = ep_on_cpu_build();
    if (stops) take_a_long_deadline(self);
    meet(self, kReady, self->env.size);
    if (is_victim(self)) {
        if (!stops) die(self);
        ep_set_mishap(kEpStopAtLaunch, true);
    }
    Freed freed;
    start_to_free(&freed, self->env.stream);
    expect_no_group(self, self->env.comm, self->env.stream);
    // Ranks of other nodes miss it in an exchange over NCCL, which does not tell whom it waits for.
    const bool is_near = ep_node_distance((unsigned)self->env.rank, (unsigned)self->victim) == 0;
    if (stops && is_near) EP_CHECK(names(ep_last_error(), self->victim));
    meet(self, kNoticed, survivors(self));
    if (stops && self->env.rank == 0) EP_CHECK(kill(atomic_load(&self->shared->victim_process), SIGKILL) == 0);
    abort_and_go_on(self);
    EP_REQUIRE(pthread_join(freed.thread, NULL) == 0);
}

// The victim, which stops in its next call of a function of NCCL that the library alone calls, and that function.
static DeathRank* g_lost;
static const char* g_lost_in;

static void* nccl_function(const char* name) {
    enum { kUntilOthersCameUs = 50000 };
    if (g_lost != NULL && strcmp(name, g_lost_in) == 0) {
        // The others may still be in the exchange before.
        usleep(kUntilOthersCameUs);
        be_lost(g_lost, SIGSTOP);
    }
    return dlsym(RTLD_NEXT, name);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
    ncclResult_t (*next)(ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*);
    void* found = nccl_function("ncclCommInitRankConfig");
    memcpy(&next, &found, sizeof(next));
    return next(comm, ranks, id, rank, config);
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t on) {
    ncclResult_t (*next)(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    void* found = nccl_function("ncclSend");
    memcpy(&next, &found, sizeof(next));
    return next(data, count, type, peer, comm, on);
}

// The victim stops where the ranks connect their network, and one deadline ends the creation. Nothing but a collective
// comes before: a group would leave them a network.
static void stop_in(DeathRank* self, const char* function) {
    const EpEnv* env = &self->env;
    char* memory = ep_device_alloc((size_t)env->size);
    EP_REQUIRE_NCCL(ncclAllGather(memory + env->rank, memory, 1, ncclInt8, env->comm, env->stream));
    EP_CHECK_CUDA(cudaStreamSynchronize(env->stream));
    ep_device_free(memory);
    take_a_long_deadline(self);
    meet(self, kReady, self->env.size);
    g_lost_in = function;
    if (is_victim(self)) g_lost = self;
    expect_no_group(self, self->env.comm, self->env.stream);
    note_text(self, ep_last_error());
    meet(self, kNoticed, survivors(self));
    EP_CHECK(atomic_load(&self->shared->named) > 0);
    abort_and_go_on(self);
}

DEATH_CASE(stops_before_it_joins_the_network, kVictimStops) { stop_in(self, "ncclCommInitRankConfig"); }

DEATH_CASE(stops_before_it_sends_over_the_network, kVictimStops) { stop_in(self, "ncclSend"); }

static ncclResult_t dispatch_to_rank_0(const EpEnv* env, ncclEpHandle_t handle, void* memory) {
    EpView sent;
    EpView received;
    ep_view_2d(&sent, memory, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, 1, 64);
    ep_view_2d(&received, (char*)memory + 128, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, (unsigned)env->size, 64);
    const ncclNDTensor_t* inputs[] = {&sent.tensor};
    ncclNDTensor_t* outputs[] = {&received.tensor};
    return ncclEpDispatch(handle, inputs, 1, outputs, 1, NULL, 0, 0, NULL, env->stream);
}

// On the CPU backend and over nodes the creation of a high-throughput handle waits behind an operation that fails
// at its deadline. It must not start a second deadline.
DEATH_CASE(dies_before_an_operation_and_a_handle, kVictimDies) {
    const EpEnv* env = &self->env;
    take_a_long_deadline(self);
    const ncclEpGroupConfig_t config = ep_group_config(NCCL_EP_ALGO_HIGH_THROUGHPUT, (unsigned)env->size, 1, 128);
    ncclEpGroup_t group = NULL;
    ncclEpHandle_t handle = NULL;
    ncclEpHandle_t next = NULL;
    const int64_t id = 0;
    void* ids = ep_device_upload(&id, sizeof(id));
    void* memory = ep_device_alloc(128 * (1 + (size_t)env->size));
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group, env->comm, &config, env->stream, NULL, NULL));
    EP_REQUIRE_NCCL(ep_handle_create(&handle, group, ids, 1, 1, env->stream));
    EP_CHECK_CUDA(cudaStreamSynchronize(env->stream));
    meet(self, kReady, env->size);
    if (is_victim(self)) die(self);
    const double start = ep_seconds();
    const ncclResult_t dispatched = dispatch_to_rank_0(env, handle, memory);
    EP_CHECK(dispatched == ncclSuccess || (ep_num_nodes() > 1 && dispatched == ncclRemoteError));
    const ncclResult_t result = ep_handle_create(&next, group, ids, 1, 1, env->stream);
    check_in_time(self, start);
    EP_CHECK_EQ_I64(result, host_waits_for_routing() ? ncclRemoteError : ncclSuccess);
    expect_fault(self, group, start);
    EP_CHECK_NCCL(ncclEpHandleDestroy(next));
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
    check_in_time(self, start);
    ep_device_free(memory);
    ep_device_free(ids);
    abort_and_go_on(self);
}

static void make_trip(RefRun* run) {
    ref_play_pair(run);
    ep_sync(run->env);
    EP_CHECK_RESULT(ep_group_state(run->group), ncclSuccess);
}

// The library's part of destroying a group; each call must return in time. cudaFree, which frees
// the buffers, waits for the stuck exchange.
static void destroy_group(DeathRank* self, RefRun* run, ncclNDTensor_t* tensor) {
    double start = ep_seconds();
    EP_CHECK_NCCL(ncclEpTensorDestroy(run->group, tensor));
    check_in_time(self, start);
    start = ep_seconds();
    EP_CHECK_NCCL(ref_run_end_group(run));
    check_in_time(self, start);
}

// A communicator on which a creation is to be lost, and a stream for that.
static void make_lost(const EpEnv* env, ncclComm_t* lost, cudaStream_t* stream) {
    EP_REQUIRE_CUDA(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    EP_REQUIRE_NCCL(ncclCommSplit(env->comm, 0, env->rank, lost, NULL));
}

static void abort_lost(ncclComm_t lost, cudaStream_t stream) {
    EP_CHECK_NCCL(ncclCommAbort(lost));
    // The aborted exchange may have left its error on the stream.
    (void)cudaStreamSynchronize(stream);
    (void)cudaGetLastError();
}

static ncclNDTensor_t some_tensor(const RefRun* run) {
    return ep_tensor_2d(run->group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, 4, 16);
}

// All ranks live, but the victim never joins the creation of a second group. The exchange stays on
// the device, where any wait for the whole device would wait for it. The earlier group keeps
// working and ends on all ranks; so does a new one.
DEATH_CASE(creation_is_lost_beside_a_group, kVictimLives) {
    EpEnv* env = &self->env;
    cudaStream_t lost_stream = NULL;
    ncclComm_t lost = NULL;
    ncclComm_t later = NULL;
    make_lost(env, &lost, &lost_stream);
    EP_REQUIRE_NCCL(ncclCommSplit(env->comm, 0, env->rank, &later, NULL));
    RefRun before = open_work(env, 1);
    ncclNDTensor_t first_tensor = some_tensor(&before);
    connect_ranks(self, lost, lost_stream);
    connect_ranks(self, later, env->stream);
    EpEnv later_env = *env;
    later_env.comm = later;
    meet(self, kReady, env->size);

    if (!is_victim(self)) expect_no_group(self, lost, lost_stream);
    meet(self, kNoticed, env->size);
    make_trip(&before);
    RefRun after = open_work(&later_env, 2);
    ncclNDTensor_t second_tensor = some_tensor(&after);
    destroy_group(self, &before, &first_tensor);
    make_trip(&after);
    destroy_group(self, &after, &second_tensor);
    meet(self, kAllKnow, env->size);

    abort_lost(lost, lost_stream);
    ref_run_close(&before);
    ref_run_close(&after);
    connect_ranks(self, later, env->stream);
    expect_context_usable(self);
    EP_CHECK_NCCL(ncclCommDestroy(later));
    EP_CHECK_NCCL(ncclCommDestroy(env->comm));
    EP_CHECK_CUDA(cudaStreamDestroy(lost_stream));
    EP_CHECK_CUDA(cudaStreamDestroy(env->stream));
}

static void end_with_lost(DeathRank* self, RefRun* run, ncclComm_t lost, cudaStream_t stream) {
    abort_lost(lost, stream);
    ref_run_close(run);
    expect_context_usable(self);
    EP_CHECK_NCCL(ncclCommAbort(self->env.comm));
    EP_CHECK_CUDA(cudaStreamDestroy(stream));
    EP_CHECK_CUDA(cudaStreamDestroy(self->env.stream));
}

// All ranks live, but the victim never joins a creation. An earlier group, whose last operation
// lacks the victim, fails before, or has that operation behind the creation.
static void lose_a_creation(DeathRank* self, bool fails_first) {
    EpEnv* env = &self->env;
    cudaStream_t lost_stream = NULL;
    ncclComm_t lost = NULL;
    make_lost(env, &lost, &lost_stream);
    RefRun run = open_work(env, 1);
    connect_ranks(self, lost, lost_stream);
    ref_prepare_dispatch(&run);
    meet(self, kReady, env->size);

    if (!is_victim(self)) {
        const double start = ep_seconds();
        if (fails_first) {
            EP_CHECK_NCCL(ref_launch_dispatch(&run, kRefWhole, env->stream));
            expect_fault(self, run.group, start);
        }
        expect_no_group(self, lost, lost_stream);
        if (!fails_first) EP_CHECK_NCCL(ref_launch_dispatch(&run, kRefWhole, lost_stream));
    }
    meet(self, kNoticed, env->size);
    const double start = ep_seconds();
    const ncclResult_t ended = ref_run_end_group(&run);
    if (fails_first) EP_CHECK_NCCL(ended);
    EP_CHECK(fails_first || is_victim(self) || ended == ncclRemoteError);
    check_in_time(self, start);
    meet(self, kAllKnow, env->size);

    end_with_lost(self, &run, lost, lost_stream);
}

// The creation is to replace a group that has failed. While that is stuck, nothing that still ends of the failed group
// may wait for the device: it would hold up this thread, and with it the abort that ends the wait.
DEATH_CASE(creation_is_lost_after_a_failure, kVictimLives) { lose_a_creation(self, true); }

// The group ends after one deadline, its network with it.
DEATH_CASE(group_ends_behind_a_lost_creation, kVictimLives) { lose_a_creation(self, false); }

DEATH_CASE(creation_is_lost_while_memory_is_freed, kVictimLives) {
    connect_ranks(self, self->env.comm, self->env.stream);
    Freed freed;
    meet(self, kReady, self->env.size);
    if (!is_victim(self)) {
        start_to_free(&freed, self->env.stream);
        expect_no_group(self, self->env.comm, self->env.stream);
    }
    meet(self, kNoticed, self->env.size);
    abort_lost(self->env.comm, self->env.stream);
    if (!is_victim(self)) EP_REQUIRE(pthread_join(freed.thread, NULL) == 0);
    expect_context_usable(self);
    EP_CHECK_CUDA(cudaStreamDestroy(self->env.stream));
}
