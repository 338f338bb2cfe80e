// A rank dies or stalls. The others learn of it within the deadline, with a text that says who waited for whom. Their
// CUDA context stays usable, their group can be destroyed, and they continue without the lost rank.
//
//   test_death [--ranks N | --nodes SPLIT] [WORD]
//       runs the cases whose name contains WORD on N ranks (4) of one node, or on ranks of several: SPLIT has a
//       character for each, which names its node
//
// It starts its own processes: do not start it with mpirun on more than one rank. The deadline is
// NCCL_EP_TIMEOUT_MS, by default 1000.
#define _GNU_SOURCE  // usleep
#include <unistd.h>

#include "harness/nodes.h"
#include "suites/death/work.h"

enum { kDefaultTimeoutMs = 1000, kDefaultRanks = 4 };
enum { kOpsInFlight = 4, kLongestRun = 400, kOpsBeforeDeath = 21 };

// ---- The cases ---------------------------------------------------------------------------------

// The exchange of a high-throughput handle's routing; on the GPUs of one node the host does not wait for it.
DEATH_CASE(dies_before_an_ht_handle, kVictimDies) {
    const EpEnv* env = &self->env;
    const ncclEpGroupConfig_t config = ep_group_config(NCCL_EP_ALGO_HIGH_THROUGHPUT, (unsigned)env->size, 1, 128);
    ncclEpGroup_t group = NULL;
    ncclEpHandle_t handle = NULL;
    const int64_t id = 0;
    void* ids = ep_device_upload(&id, sizeof(id));
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group, env->comm, &config, env->stream, NULL, NULL));
    EP_REQUIRE_NCCL(ep_handle_create(&handle, group, ids, 1, 1, env->stream));
    EP_CHECK_CUDA(cudaStreamSynchronize(env->stream));
    lose_victim(self);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    const double start = ep_seconds();
    handle = NULL;
    const ncclResult_t result = ep_handle_create(&handle, group, ids, 1, 1, env->stream);
    if (host_waits_for_routing()) {
        EP_CHECK_EQ_I64(result, ncclRemoteError);
        check_in_time(self, start);
        expect_waiter_named(ep_last_error());
    } else {
        EP_CHECK_NCCL(result);
        expect_fault(self, group, start);
        meet(self, kNoticed, survivors(self));
        EP_CHECK_EQ_I64(atomic_load(&self->shared->named), survivors(self));
        EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    }
    const double destroyed = ep_seconds();
    const ncclResult_t end = ncclEpGroupDestroy(group, env->stream);
    EP_CHECK_NCCL(end);
    check_in_time(self, destroyed);
    ep_device_free(ids);
    abort_and_go_on(self);
}

DEATH_WORK_CASE(dies_while_others_wait, kVictimDies) {
    ref_prepare_dispatch(run);
    meet(self, kReady, self->env.size);
    if (is_victim(self)) {
        usleep(self->timeout_ms * 1000 / 4);
        die(self);
    }
    const double start = ep_seconds();
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefStaged, self->env.stream));
    EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, self->env.stream));
    expect_fault(self, run->group, start);
    finish_survivor(self, run);
}

// Freeing memory waits for the device, and holds up other calls of the process meanwhile.
DEATH_WORK_CASE(dies_while_memory_is_freed, kVictimDies) {
    allow_for_a_free(self);
    ref_prepare_dispatch(run);
    void* memory = ep_device_alloc(1 << 20);
    lose_victim(self);
    const double start = ep_seconds();
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, self->env.stream));
    ep_device_free(memory);
    check_in_time(self, start);
    expect_fault(self, run->group, start);
    finish_survivor(self, run);
}

// Runs operations on the same inputs, a few in flight, until the group fails. Returns when the last
// of them was launched.
static double run_until_fault(DeathRank* self, RefRun* run, unsigned most) {
    double launched = ep_seconds();
    for (unsigned i = 0; i < most; ++i) {
        launched = ep_seconds();
        const ncclResult_t result = i % 2 == 0 ? ref_launch_dispatch(run, kRefWhole, self->env.stream)
                                               : ref_launch_combine(run, kRefWhole, self->env.stream);
        if (result != ncclSuccess) break;
        if (i % kOpsInFlight != kOpsInFlight - 1) continue;
        EP_CHECK_CUDA(cudaStreamSynchronize(self->env.stream));
    }
    return launched;
}

DEATH_WORK_CASE(dies_in_a_run, kVictimDies) {
    meet(self, kReady, self->env.size);
    if (is_victim(self)) {
        run_until_fault(self, run, kOpsBeforeDeath);
        die(self);
    }
    run_until_fault(self, run, kLongestRun);
    wait_for_loss(self);
    expect_fault(self, run->group, atomic_load(&self->shared->lost));
    finish_survivor(self, run);
}

// The survivors never wait for the device, so their streams are full when the group fails: on a GPU a stream takes
// about a thousand launches, and further ones wait.
DEATH_WORK_CASE(dies_before_many_operations, kVictimDies) {
    lose_victim(self);
    const double start = ep_seconds();
    ncclResult_t result = ncclSuccess;
    for (unsigned i = 0; result == ncclSuccess && in_time(self, start); ++i) {
        result = i % 2 == 0 ? ref_launch_dispatch(run, kRefWhole, self->env.stream)
                            : ref_launch_combine(run, kRefWhole, self->env.stream);
    }
    EP_CHECK_EQ_I64(result, ncclRemoteError);
    expect_fault(self, run->group, start);
    finish_survivor(self, run);
}

// Nothing is in flight: destroying the group is the first step that misses the victim.
DEATH_WORK_CASE(dies_before_destruction, kVictimDies) {
    lose_victim(self);
    end_without_victim(self, run);
    abort_and_go_on(self);
}

// All ranks live. The victim stops, resumes after the others have given up, and learns of it.
DEATH_WORK_CASE(stalls_and_comes_back, kVictimLives) {
    meet(self, kReady, self->env.size);
    if (is_victim(self)) meet(self, kNoticed, self->env.size);
    const double start = ep_seconds();
    // What the others sent before they gave up may still complete an operation of the victim.
    const double launched = run_until_fault(self, run, kOpsInFlight);
    expect_fault(self, run->group, is_victim(self) ? launched : start);
    if (!is_victim(self)) {
        expect_refusals(run);
        meet(self, kNoticed, self->env.size);
        expect_victim_named(self);
    }
    expect_context_usable(self);
    finish_behind_a_stall(self, run);
}

// ---- The program -------------------------------------------------------------------------------

// Why a case cannot run here; NULL if it can.
static const char* obstacle(const DeathCase* test, bool has_nodes) {
    const bool needs_another_communicator = strcmp(test->name, "creation_is_lost_beside_a_group") == 0 ||
                                            strcmp(test->name, "creation_is_lost_after_a_failure") == 0 ||
                                            strcmp(test->name, "group_ends_behind_a_lost_creation") == 0;
    if (ep_on_fake_nccl() && needs_another_communicator) return "communicators take turns here";
    if (ep_on_host_backend() && strcmp(test->name, "dies_before_many_operations") == 0) {
        return "streams of the CPU backend are never full";
    }
    const bool needs_network = strstr(test->name, "_the_network") != NULL;
    if (needs_network && (ep_on_host_backend() || !has_nodes)) return "no network between nodes";
    if (has_nodes && strstr(test->name, "mapped") != NULL) return "over nodes such rows take the rings";
    return NULL;
}

int main(int argc, char** argv) {
    unsigned num_ranks = kDefaultRanks;
    // A stream of the shim is full before its kernels take too long.
    if (!ep_on_host_backend()) EP_REQUIRE(setenv("NCCLEP_HOSTSIM_QUEUE", "40", 0) == 0);
    const char* word = "";
    const char* split = "";
    const EpOption table[] = {{"--ranks", &num_ranks, NULL}, {"--nodes", NULL, &split}};
    const bool good = ep_read_options(argc, argv, table, 2, &word);
    if (split[0] != '\0') num_ranks = (unsigned)strlen(split);
    if (!good || num_ranks < 2 || num_ranks > kMaxRanks) {
        fprintf(stderr, "usage: test_death [--ranks 2..%d | --nodes SPLIT] [WORD]\n", kMaxRanks);
        return 2;
    }
    const DeathSetting setting = {(int)num_ranks, (int)num_ranks - 1, timeout_from_environment(kDefaultTimeoutMs),
                                  kSlackMs, split};
    for (const DeathCase* test = death_cases(); test != NULL; test = test->next) {
        if (strstr(test->name, word) == NULL) continue;
        const char* why = obstacle(test, split[0] != '\0');
        if (why != NULL) {
            printf("%-48s skipped: %s\n", test->name, why);
            continue;
        }
        const uint64_t failed_before = ep_failed();
        run_death_case(test, setting);
        print_outcome(test->name, failed_before);
    }
    return end_program();
}
