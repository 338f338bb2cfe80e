// Random faults: during random work a random rank is killed, stopped for good, or stopped for less than the deadline.
// The others learn of a loss about one deadline later, with ncclRemoteError and a text that names ranks, and continue
// without the lost rank. A short pause has no effect: all results are right. In every other trial a second thread frees
// memory all the while, which waits for the device and holds up most other calls.
//
//   test_faults [--ranks N | --nodes SPLIT] [--trials N] [--seconds N] [--seed N] [--only TRIAL]
//               [--kinds A,B] [--faults A,B]
//
// nodes   a character per rank, which names its node
// kinds   ll, staged, ht: operations; handles: of high throughput; groups; first, unless chosen not among them:
//         groups, of which the fault may meet the first, where NCCL connects the ranks
// faults  kill, stop, pause
//
// It starts its own processes, without mpirun. The seed and the number of a trial, which are printed with it, determine
// everything except the ranks' progress at the time of the fault. The deadline is NCCL_EP_TIMEOUT_MS, by default 1000.
#define _GNU_SOURCE  // usleep
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "forked/survivors.h"

// ---- Work in rounds that each need all ranks -----------------------------------------------------

typedef enum { kLl, kStaged, kHt, kHandles, kGroups, kFirst, kNumKinds } Kind;

// Each round ends with an idle stream, so no rank is more than one round ahead of another.
typedef struct {
    const EpEnv* env;
    Kind kind;
    ncclEpGroup_t group;  // not in kGroups and kFirst
    RefRun run;           // kLl, kStaged, kHt
    void* ids;           // kHandles
    double began;        // start of the round
    ncclResult_t fault;  // of the failed call or operation
    char text[512];      // its text
} Job;

enum { kMaxTokens = 12, kTopK = 3, kHidden = 64, kLocalExperts = 2 };

static bool has_run(const Job* job) { return job->kind <= kHt; }

static void job_open(Job* job, const EpEnv* env, Kind kind, uint64_t seed) {
    memset(job, 0, sizeof(*job));
    job->env = env;
    job->kind = kind;
    const unsigned experts = kLocalExperts * (unsigned)env->size;
    if (has_run(job)) {
        const RefShape shape = {experts, kMaxTokens, kTopK, ncclBfloat16, kHidden};
        const RefStyle style = (RefStyle)(seed % (kRefSkewed + 1));
        job->run = ref_run_open_with(env, NULL, &shape, style, true, kind == kHt ? ref_ht(seed) : ref_ll(seed));
        job->group = job->run.group;
    } else if (kind == kHandles) {
        const int64_t id = 0;
        job->group = ep_group_create(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, experts, 1, 128);
        job->ids = ep_device_upload(&id, sizeof(id));
    }
}

// Keeps the code and the text of a failure.
static bool works(Job* job, ncclResult_t result) {
    if (result == ncclSuccess) return true;
    job->fault = result;
    snprintf(job->text, sizeof(job->text), "%s", ep_last_error());
    return false;
}

// Waits for the enqueued work and returns whether it succeeded.
static bool went_well(Job* job) {
    EP_CHECK_CUDA(cudaStreamSynchronize(job->env->stream));
    return works(job, ep_group_state(job->group));
}

static bool complete(Job* job) {
    return job->kind != kStaged || works(job, ncclEpComplete(job->run.handle, NULL, job->env->stream));
}

static bool run_round(Job* job) {
    const RefPass pass = job->kind == kStaged ? kRefStaged : kRefCounted;
    RefRun* run = &job->run;
    ref_prepare_dispatch(run);
    if (!works(job, ref_launch_dispatch(run, pass, job->env->stream))) return false;
    if (!complete(job) || !went_well(job)) return false;
    ref_check_dispatch(run);
    ref_prepare_combine(run);
    if (!works(job, ref_launch_combine(run, run->ht ? kRefBackward : pass, job->env->stream))) return false;
    return complete(job) && went_well(job) && ref_check_combine(run);
}

static bool handle_round(Job* job) {
    ncclEpHandle_t handle = NULL;
    if (!works(job, ep_handle_create(&handle, job->group, job->ids, 1, 1, job->env->stream))) return false;
    const bool well = went_well(job);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    return well;
}

static bool group_round(Job* job) {
    const ncclEpGroupConfig_t config = ep_group_config(NCCL_EP_ALGO_LOW_LATENCY, (unsigned)job->env->size, 4, 128);
    ncclEpGroup_t group = NULL;
    return works(job, ncclEpCreateGroup(&group, job->env->comm, &config, job->env->stream, NULL, NULL)) &&
           works(job, ncclEpGroupDestroy(group, job->env->stream));
}

// One round with its results compared; false if it failed.
static bool job_round(Job* job) {
    job->began = ep_seconds();
    if (has_run(job)) return run_round(job);
    return job->kind == kHandles ? handle_round(job) : group_round(job);
}

// A failed group refuses further calls.
static void job_expect_refusals(Job* job) {
    if (!has_run(job)) return;
    EP_CHECK(ref_launch_combine(&job->run, kRefWhole, job->env->stream) != ncclSuccess);
    EP_CHECK_STR_CONTAINS(ep_last_error(), "the group has failed");
}

// Destroys the handle and the group, also after a failure.
static void job_end(Job* job) {
    if (has_run(job)) EP_CHECK_NCCL(ref_run_end_group(&job->run));
    if (job->kind == kHandles) EP_CHECK_NCCL(ncclEpGroupDestroy(job->group, job->env->stream));
}

// Frees the buffers. A stuck exchange would block this, so abort its communicator first.
static void job_free(Job* job) {
    if (has_run(job)) ref_run_close(&job->run);
    if (job->kind == kHandles) ep_device_free(job->ids);
}

// ---- The plan ------------------------------------------------------------------------------------

enum { kDefaultTimeoutMs = 1000, kSlackMs = 5000, kPollUs = 500, kMostTextBytes = 128 };
enum { kLatestUs = 120000, kShortestPauseUs = 2000, kAfterPauseUs = 60000, kRoundsToEnd = 4 };
enum { kSetUpSeconds = 60, kBetweenFreesUs = 2000, kLatestFirstUs = 20000 };

typedef enum { kKill, kStop, kPause, kNumFaults } Fault;

static const char* const kKindNames[kNumKinds] = {"ll", "staged", "ht", "handles", "groups", "first"};
static const char* const kFaultNames[kNumFaults] = {"kill", "stop", "pause"};

// The plan of a trial. The forked ranks inherit it.
typedef struct {
    Kind kind;
    Fault fault;
    int victim;
    unsigned moment_us, pause_us;
    uint64_t seed;
    bool frees;
} Plan;

static Plan g_plan;

// ---- The parent --------------------------------------------------------------------------------

static void disturb(SharedState* shared, int num_ranks, pid_t victim) {
    const double limit = ep_seconds() + kSetUpSeconds;
    while (atomic_load(&shared->arrived[kReady]) < num_ranks && ep_seconds() < limit) usleep(kPollUs);
    usleep(g_plan.moment_us);
    atomic_store(&shared->lost, ep_seconds());
    kill(victim, g_plan.fault == kKill ? SIGKILL : SIGSTOP);
    if (g_plan.fault == kPause) {
        usleep(g_plan.pause_us);
        kill(victim, SIGCONT);
        usleep(kAfterPauseUs);
    }
    atomic_store(&shared->over, true);
}

// ---- The ranks ---------------------------------------------------------------------------------

// After a pause all ranks end with the same round. Rank 0 picks it, a few rounds ahead, as no other
// rank is more than one round ahead of it.
static bool is_last(const DeathRank* self, unsigned round) {
    SharedState* shared = self->shared;
    if (g_plan.fault != kPause) return false;
    const bool known = atomic_load(&shared->last_round) != 0;
    if (self->env.rank == 0 && atomic_load(&shared->over) && !known) {
        atomic_store(&shared->last_round, round + kRoundsToEnd);
    }
    const unsigned last = atomic_load(&shared->last_round);
    return last != 0 && round >= last;
}

// Plays rounds until one fails or the last one is over; returns true in the latter case.
static bool play(DeathRank* self, Job* job) {
    for (unsigned round = 1; !is_last(self, round); ++round) {
        if (!job_round(job)) return false;
    }
    return true;
}

// Checks the error of a loss, and notes whether it names the victim.
static void check_error(DeathRank* self, const Job* job) {
    // While it connects the ranks, NCCL may notice a death at once, and have any error for it.
    if (job->kind == kFirst && strstr(job->text, "NCCL error ") != NULL) {
        atomic_fetch_add(&self->shared->named, 1);
        return;
    }
    EP_CHECK_EQ_I64(job->fault, ncclRemoteError);
    // A rank may die when the others know where its window is, and have not mapped it yet.
    if (strstr(job->text, " cannot map rank ") != NULL) {
        EP_CHECK_STR_CONTAINS(job->text, "rank ");
    } else {
        expect_waiter_named(job->text);
    }
    // In an exchange over NCCL only NCCL can tell which rank is missing.
    const bool nameless = strstr(job->text, "for the other ranks in an exchange") != NULL;
    if (nameless || names(job->text, self->victim)) atomic_fetch_add(&self->shared->named, 1);
}

static void expect_loss(DeathRank* self, Job* job) {
    const double lost = atomic_load(&self->shared->lost);
    // No rank fails before one is lost.
    EP_CHECK(lost > 0);
    // All exchanges of a creation have one deadline together.
    check_in_time(self, job->began > lost || job->kind == kFirst ? job->began : lost);
    check_error(self, job);
    meet(self, kNoticed, survivors(self));
    EP_CHECK(atomic_load(&self->shared->named) > 0);
}

// Frees memory again and again in a thread of its own.
typedef struct {
    const EpEnv* env;
    atomic_bool is_over;
    pthread_t thread;
} Freer;

static void* free_memory(void* argument) {
    Freer* freer = argument;
    EP_CHECK_CUDA(cudaSetDevice(freer->env->device));
    while (!atomic_load(&freer->is_over)) {
        void* memory = ep_device_alloc(1 << 16);
        usleep(kBetweenFreesUs);
        // An exchange that was aborted may have left its error.
        (void)cudaFree(memory);
    }
    return NULL;
}

static void start(Freer* freer, const EpEnv* env) {
    freer->env = env;
    atomic_init(&freer->is_over, false);
    if (g_plan.frees) EP_REQUIRE(pthread_create(&freer->thread, NULL, free_memory, freer) == 0);
}

static void stop(Freer* freer) {
    atomic_store(&freer->is_over, true);
    if (g_plan.frees) EP_REQUIRE(pthread_join(freer->thread, NULL) == 0);
}

static void run_trial(DeathRank* self) {
    Job job;
    Freer freer;
    job_open(&job, &self->env, g_plan.kind, g_plan.seed);
    // NCCL connects the ranks in a communicator's first collective and waits without a deadline.
    if (g_plan.kind != kFirst) EP_CHECK(job_round(&job));
    meet(self, kReady, self->env.size);
    start(&freer, &self->env);
    const bool harmed = !play(self, &job);
    if (g_plan.fault == kPause) {
        stop(&freer);
        if (!EP_CHECK(!harmed)) fprintf(stderr, "a pause did harm: %s\n", job.text);
        job_end(&job);
        job_free(&job);
        EP_CHECK_NCCL(ncclCommDestroy(self->env.comm));
        EP_CHECK_CUDA(cudaStreamDestroy(self->env.stream));
        return;
    }
    EP_CHECK(!is_victim(self));
    expect_loss(self, &job);
    job_expect_refusals(&job);
    const double ended = ep_seconds();
    job_end(&job);
    check_in_time(self, ended);
    abort_and_go_on(self);
    stop(&freer);
    job_free(&job);
}

// ---- The program -------------------------------------------------------------------------------

typedef struct {
    unsigned ranks, trials, seconds, seed, only;
    const char *kinds, *faults, *nodes;
} Options;

// Which names are in a comma-separated list, all if it is empty; returns their number.
static unsigned choose(const char* list, const char* const* table, unsigned count, unsigned* chosen) {
    char framed[kMostTextBytes + 2];
    char word[kMostTextBytes];
    unsigned found = 0;
    snprintf(framed, sizeof(framed), ",%.*s,", kMostTextBytes - 1, list);
    for (unsigned i = 0; i < count; ++i) {
        snprintf(word, sizeof(word), ",%s,", table[i]);
        if (list[0] == '\0' || strstr(framed, word) != NULL) chosen[found++] = i;
    }
    return found;
}

static bool read_options(int argc, char** argv, Options* options) {
    const EpOption table[] = {{"--ranks", &options->ranks, NULL},     {"--trials", &options->trials, NULL},
                              {"--seconds", &options->seconds, NULL}, {"--seed", &options->seed, NULL},
                              {"--only", &options->only, NULL},       {"--kinds", NULL, &options->kinds},
                              {"--faults", NULL, &options->faults},   {"--nodes", NULL, &options->nodes}};
    if (!ep_read_options(argc, argv, table, COUNT(table), NULL)) return false;
    if (options->nodes[0] != '\0') options->ranks = (unsigned)strlen(options->nodes);
    return options->ranks >= 2 && options->ranks <= kMaxRanks;
}

// The trials rotate through the kinds; everything else is drawn.
static bool draw_plan(const Options* options, unsigned trial, unsigned timeout_ms) {
    unsigned kinds[kNumKinds];
    unsigned faults[kNumFaults];
    const unsigned num_kinds = choose(options->kinds, kKindNames, kNumKinds, kinds);
    const unsigned num_faults = choose(options->faults, kFaultNames, kNumFaults, faults);
    if (num_kinds == 0 || num_faults == 0) return false;
    uint64_t dice = ep_mix(options->seed, trial, 11);
    const unsigned longest_us = timeout_ms * 1000 / 4;
    g_plan.kind = (Kind)kinds[trial % num_kinds];
    // On the stand-ins ranks have their first group soon.
    const unsigned latest_us = g_plan.kind == kFirst && ep_on_hostsim() ? kLatestFirstUs : kLatestUs;
    g_plan.fault = (Fault)faults[ep_random_below(&dice, num_faults)];
    g_plan.victim = (int)ep_random_below(&dice, options->ranks);
    g_plan.moment_us = (unsigned)ep_random_below(&dice, latest_us);
    g_plan.pause_us = kShortestPauseUs + (unsigned)ep_random_below(&dice, longest_us);
    g_plan.seed = ep_random(&dice);
    g_plan.frees = ep_random_below(&dice, 2) == 0;
    return true;
}

static bool run_one(const Options* options, unsigned trial, unsigned timeout_ms) {
    static char name[96];
    if (!draw_plan(options, trial, timeout_ms)) return false;
    snprintf(name, sizeof(name), "--seed %u --only %u: %s, %s, rank %d after %u us%s",
             options->seed, trial, kKindNames[g_plan.kind], kFaultNames[g_plan.fault],
             g_plan.victim, g_plan.moment_us, g_plan.frees ? ", frees" : "");
    static const VictimEnd kEnds[kNumFaults] = {kVictimDies, kVictimStops, kVictimLives};
    const DeathCase test = {name, run_trial, kEnds[g_plan.fault], disturb, NULL};
    // Less than a deadline, so that waiting for two fails.
    const unsigned slack_ms = g_plan.kind == kFirst ? timeout_ms / 10 * 9 : kSlackMs;
    const DeathSetting setting = {(int)options->ranks, g_plan.victim, timeout_ms, slack_ms, options->nodes};
    const uint64_t failed_before = ep_failed();
    run_death_case(&test, setting);
    print_outcome(name, failed_before);
    return true;
}

int main(int argc, char** argv) {
    Options options = {3, 10, 0, 1, 0, "ll,staged,ht,handles,groups", "", ""};
    bool good = read_options(argc, argv, &options);
    const unsigned timeout_ms = timeout_from_environment(kDefaultTimeoutMs);
    const double end = ep_seconds() + options.seconds;
    unsigned trial = options.only != 0 ? options.only : 1;
    const unsigned last = options.only != 0 ? options.only : options.trials;
    for (; good && (options.seconds != 0 ? ep_seconds() < end : trial <= last); ++trial) {
        good = run_one(&options, trial, timeout_ms);
        if (options.only != 0) break;
    }
    if (!good) {
        fprintf(stderr,
                "usage: test_faults [--ranks 2..%d | --nodes SPLIT] [--trials N] [--seconds N] [--seed N]\n"
                "       [--only TRIAL] [--kinds ll,staged,ht,handles,groups,first] [--faults kill,stop,pause]\n",
                kMaxRanks);
        return 2;
    }
    return end_program();
}
