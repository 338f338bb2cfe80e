// Forked ranks; see ranks.h. Processes are forked before the first CUDA call, as a CUDA context
// does not survive a fork.
#define _GNU_SOURCE  // MAP_ANONYMOUS, setenv, usleep
#include "forked/ranks.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness/nodes.h"

enum { kPauseUs = 200, kSetUpSeconds = 60, kWaitsPerCase = 6 };

bool is_victim(const DeathRank* self) { return self->env.rank == self->victim; }

void meet(DeathRank* self, Barrier barrier, int count) {
    atomic_int* arrived = &self->shared->arrived[barrier];
    atomic_fetch_add(arrived, 1);
    while (atomic_load(arrived) < count) usleep(kPauseUs);
}

ncclComm_t open_comm(DeathRank* self, Barrier barrier, int rank, int size) {
    ncclUniqueId* id = &self->shared->ids[barrier == kFirstId ? 0 : 1];
    if (rank == 0) EP_REQUIRE_NCCL(ncclGetUniqueId(id));
    meet(self, barrier, size);
    ncclComm_t comm = NULL;
    EP_REQUIRE_NCCL(ncclCommInitRank(&comm, size, *id, rank));
    return comm;
}

// The parent adds the counts up; this process prints no summary line.
static void hand_over_counts(const DeathRank* self) {
    self->shared->passed[self->env.rank] = ep_passed() - self->passed_before;
    self->shared->failed[self->env.rank] = ep_failed() - self->failed_before;
}

void be_lost(DeathRank* self, int by) {
    hand_over_counts(self);
    atomic_store(&self->shared->lost, ep_seconds());
    raise(by);
}

void die(DeathRank* self) { be_lost(self, SIGKILL); }

void wait_for_loss(const DeathRank* self) {
    while (atomic_load(&self->shared->lost) == 0) usleep(kPauseUs);
}

void lose_victim_by(DeathRank* self, int by) {
    meet(self, kReady, self->env.size);
    if (is_victim(self)) be_lost(self, by);
    wait_for_loss(self);
}

void lose_victim(DeathRank* self) { lose_victim_by(self, SIGKILL); }

static void open_device(EpEnv* env) {
    int devices = 0;
    EP_REQUIRE_CUDA(cudaGetDeviceCount(&devices));
    EP_REQUIRE(devices > 0);
    env->device = env->rank % devices;
    EP_REQUIRE_CUDA(cudaSetDevice(env->device));
    EP_REQUIRE_CUDA(cudaStreamCreate(&env->stream));
}

static DeathCase* g_cases;

void add_death_case(DeathCase* added) {
    DeathCase** at = &g_cases;
    while (*at != NULL) at = &(*at)->next;
    *at = added;
}

const DeathCase* death_cases(void) { return g_cases; }

static void run_rank(const DeathCase* test, DeathRank* self) {
    ep_checks_are_of_rank(self->env.rank);
    ep_watchdog_arm(&self->env, kSetUpSeconds + kWaitsPerCase * self->timeout_ms / 1000);
    ep_watchdog_at_case(test->name);
    if (is_victim(self)) atomic_store(&self->shared->victim_process, (int)getpid());
    ep_place_on_nodes(self->split, (unsigned)self->env.rank);
    open_device(&self->env);
    self->env.comm = open_comm(self, kFirstId, self->env.rank, self->env.size);
    test->run(self);
    EP_CHECK(!ep_has_leaks());
    hand_over_counts(self);
    fflush(NULL);
    _exit(0);  // the parent's exit handlers must not run here
}

static pid_t start_rank(const DeathCase* test, SharedState* shared, const DeathRank* model, int rank) {
    const pid_t child = fork();
    EP_REQUIRE(child >= 0);
    if (child > 0) return child;
    // Otherwise a stopped rank would outlive a killed parent.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    DeathRank self = *model;
    self.shared = shared;
    self.env.rank = rank;
    self.env.local_rank = rank;
    run_rank(test, &self);
    return child;
}

static bool has_ended_well(const DeathCase* test, bool is_victim, int status) {
    if (is_victim && test->end != kVictimLives) return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static int index_of(const pid_t* children, int count, pid_t child) {
    for (int i = 0; i < count; ++i) {
        if (children[i] == child) return i;
    }
    return -1;
}

// Waits for all processes. If one ends badly, kills the others, which would wait for it until their watchdogs fire.
static void wait_for_ranks(const DeathCase* test, pid_t* children, const DeathRank* model) {
    const int num_ranks = model->env.size;
    for (int left = num_ranks; left > 0; --left) {
        const pid_t victim = children[model->victim];
        if (left == 1 && test->end == kVictimStops && victim > 0) kill(victim, SIGKILL);
        int status = 0;
        const int rank = index_of(children, num_ranks, waitpid(-1, &status, 0));
        EP_REQUIRE(rank >= 0);
        children[rank] = 0;
        if (EP_CHECK(has_ended_well(test, rank == model->victim, status))) continue;
        for (int i = 0; i < num_ranks; ++i) {
            if (children[i] > 0) kill(children[i], i == model->victim ? SIGKILL : SIGTERM);
        }
    }
}

void run_death_case(const DeathCase* test, DeathSetting setting) {
    const int num_ranks = setting.num_ranks;
    SharedState* shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EP_REQUIRE(shared != MAP_FAILED);
    DeathRank model;
    memset(&model, 0, sizeof(model));
    model.env.size = num_ranks;
    model.victim = setting.victim;
    model.timeout_ms = setting.timeout_ms;
    model.slack_ms = setting.slack_ms;
    model.split = setting.split;
    model.passed_before = ep_passed();
    model.failed_before = ep_failed();
    fflush(NULL);
    pid_t children[kMaxRanks] = {0};
    for (int i = 0; i < num_ranks; ++i) children[i] = start_rank(test, shared, &model, i);
    if (test->disturb != NULL) test->disturb(shared, num_ranks, children[model.victim]);
    wait_for_ranks(test, children, &model);
    for (int i = 0; i < num_ranks; ++i) ep_count(shared->passed[i], shared->failed[i]);
    munmap(shared, sizeof(*shared));
}

void print_outcome(const char* name, uint64_t failed_before) {
    printf("%-48s %s\n", name, ep_failed() == failed_before ? "ok" : "FAILED");
    fflush(stdout);
}

int end_program(void) {
    printf("%llu passed, %llu failed\n", (unsigned long long)ep_passed(), (unsigned long long)ep_failed());
    return ep_failed() == 0 && ep_passed() > 0 ? 0 : 1;
}

unsigned timeout_from_environment(unsigned otherwise) {
    char text[16];
    const char* patience = getenv("EP_TEST_PATIENCE");
    const unsigned times = patience == NULL ? 1 : (unsigned)strtoul(patience, NULL, 10);
    snprintf(text, sizeof(text), "%u", otherwise * (times > 0 ? times : 1));
    setenv("NCCL_EP_TIMEOUT_MS", text, 0);
    return (unsigned)strtoul(getenv("NCCL_EP_TIMEOUT_MS"), NULL, 10);
}
