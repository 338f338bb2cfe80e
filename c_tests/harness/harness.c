// Life of a test program: MPI, the device, the NCCL communicator, the table of cases and the
// closing line. A step of the set-up that fails ends all processes at once, because a rank that is
// missing would leave the others waiting in their next collective call.
#define _GNU_SOURCE  // for RTLD_DEFAULT, usleep
#include "base.h"
#include "nodes.h"

#include <dlfcn.h>
#include <limits.h>
#include <malloc.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

enum { kDefaultDeadlineSeconds = 120 };

static int local_rank_of_world(void) {
    MPI_Comm host;
    int local_rank = 0;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, &local_rank);
    MPI_Comm_free(&host);
    return local_rank;
}

void ep_init_mpi(EpEnv* env, int* argc, char*** argv) {
    memset(env, 0, sizeof(*env));
    // What is freed stays with the process: large buffers come and go, and to fault their pages in takes longer than
    // to fill them.
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, INT_MAX);
    ep_init_unwatched(argc, argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &env->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &env->size);
    env->local_rank = local_rank_of_world();
    ep_find_nodes();
    ep_watchdog_arm(env, ep_watchdog_default(kDefaultDeadlineSeconds));
}

ncclComm_t ep_new_comm(const EpEnv* env) {
    ncclUniqueId id;
    ncclComm_t comm = NULL;
    memset(&id, 0, sizeof(id));
    if (env->rank == 0) EP_REQUIRE_NCCL(ncclGetUniqueId(&id));
    MPI_Bcast(&id, (int)sizeof(id), MPI_BYTE, 0, MPI_COMM_WORLD);
    EP_REQUIRE_NCCL(ncclCommInitRank(&comm, env->size, id, env->rank));
    return comm;
}

void ep_init_device(EpEnv* env) {
    int devices = 0;
    EP_REQUIRE_CUDA(cudaGetDeviceCount(&devices));
    EP_REQUIRE(devices > 0);
    env->device = env->local_rank % devices;
    EP_REQUIRE_CUDA(cudaSetDevice(env->device));
    EP_REQUIRE_CUDA(cudaStreamCreate(&env->stream));
    env->comm = ep_new_comm(env);
    ep_enter_node();
}

void ep_init(EpEnv* env, int* argc, char*** argv) {
    ep_init_mpi(env, argc, argv);
    ep_init_device(env);
}

void ep_release(EpEnv* env) {
    if (env->comm != NULL) EP_REQUIRE_NCCL(ncclCommDestroy(env->comm));
    if (env->stream != NULL) EP_REQUIRE_CUDA(cudaStreamDestroy(env->stream));
    env->comm = NULL;
    env->stream = NULL;
    MPI_Finalize();
    ep_watchdog_arm(env, 0);
}

int ep_finish(EpEnv* env) {
    if (ep_has_leaks()) ep_check(EP_HERE("no memory is lost"), false);
    uint64_t mine[2] = {ep_passed(), ep_failed()};
    uint64_t all[2] = {0, 0};
    MPI_Allreduce(mine, all, 2, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    fflush(stderr);
    const bool nothing_ran = all[0] + all[1] == 0;
    // Before MPI ends, because mpirun may kill this process once another has ended with a failure.
    if (env->rank == 0) {
        if (ep_skipped() > 0) printf("%u skipped: %s\n", ep_skipped(), ep_skip_reason());
        if (nothing_ran && ep_skipped() == 0) fprintf(stderr, "no check ran\n");
        printf("%llu passed, %llu failed\n", (unsigned long long)all[0], (unsigned long long)all[1]);
        fflush(stdout);
    }
    ep_release(env);
    if (nothing_ran) return ep_skipped() > 0 ? kEpSkippedStatus : 1;
    return all[1] == 0 ? 0 : 1;
}

void ep_skip_high_throughput(void) { ep_skip("no high throughput on this backend"); }

// Process 0 reports a case as soon as all processes are through it.
static void run_case(EpEnv* env, const EpCase* test) {
    const uint64_t failed_before = ep_failed();
    const unsigned skipped_before = ep_skipped();
    ep_watchdog_at_case(test->name);
    if (test->needs_ht && !ep_has_high_throughput(env)) {
        ep_skip_high_throughput();
    } else {
        test->run(env);
    }
    ep_watchdog_case_done();
    uint64_t failed = ep_failed() - failed_before;
    uint64_t all_failed = 0;
    MPI_Allreduce(&failed, &all_failed, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    if (env->rank == 0) {
        const char* fine = ep_skipped() > skipped_before ? "skipped" : "ok";
        printf("%-48s %s\n", test->name, all_failed == 0 ? fine : "FAILED");
        fflush(stdout);
    }
}

static EpCase* g_cases;

static bool is_before(const EpCase* a, const EpCase* b) {
    if (a->is_last != b->is_last) return b->is_last;
    const int files = strcmp(a->file, b->file);
    return files != 0 ? files < 0 : a->line < b->line;
}

void ep_add_case(EpCase* added) {
    EpCase** at = &g_cases;
    while (*at != NULL && is_before(*at, added)) at = &(*at)->next;
    added->next = *at;
    *at = added;
}

// Whether its name has one of the words after the program's name, if there are any, and none that begin with '-'.
static bool is_wanted(const EpCase* it, int argc, char** argv) {
    bool has_word = false;
    bool all = true;
    for (int i = 1; i < argc; ++i) {
        if (argv[i][0] == '-') {
            if (strstr(it->name, argv[i] + 1) != NULL) return false;
        } else {
            has_word = has_word || strstr(it->name, argv[i]) != NULL;
            all = false;
        }
    }
    return has_word || all;
}

// A case that has got another name must not drop out of a run unseen.
static void check_words(const EpEnv* env, int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
        const EpCase* it = g_cases;
        while (it != NULL && strstr(it->name, argv[i]) == NULL) it = it->next;
        if (it != NULL || argv[i][0] == '-') continue;
        if (env->rank == 0) fprintf(stderr, "no case has \"%s\" in its name\n", argv[i]);
        ep_count(0, 1);
    }
}

int ep_main(int argc, char** argv) {
    EpEnv env;
    ep_init(&env, &argc, &argv);
    check_words(&env, argc, argv);
    for (const EpCase* it = g_cases; it != NULL; it = it->next) {
        if (is_wanted(it, argc, argv)) run_case(&env, it);
    }
    return ep_finish(&env);
}

// For programs without a main of their own.
__attribute__((weak)) int main(int argc, char** argv) { return ep_main(argc, argv); }

bool ep_read_options(int argc, char** argv, const EpOption* options, size_t count, const char** word) {
    bool has_word = word == NULL;
    for (int i = 1; i < argc; ++i) {
        const EpOption* found = NULL;
        for (size_t n = 0; n < count; ++n) {
            if (strcmp(argv[i], options[n].name) == 0) found = &options[n];
        }
        if (found == NULL && (has_word || argv[i][0] == '-')) return false;
        if (found == NULL) {
            has_word = true;
            *word = argv[i];
            continue;
        }
        if (++i == argc) return false;
        char* end = argv[i];
        if (found->number != NULL) *found->number = (unsigned)strtoul(argv[i], &end, 10);
        if (found->number != NULL && (end == argv[i] || *end != '\0')) return false;
        if (found->text != NULL) *found->text = argv[i];
    }
    return true;
}

double ep_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

bool ep_on_hostsim(void) { return ep_on_host_backend() || ep_on_cpu_build(); }

bool ep_on_fake_nccl(void) { return dlsym(RTLD_DEFAULT, "ncclEpFakeNccl") != NULL; }

bool ep_on_host_backend(void) { return dlsym(RTLD_DEFAULT, "ncclEpHostsimAbi") != NULL; }

bool ep_on_cpu_build(void) { return dlsym(RTLD_DEFAULT, "ncclEpSimt") != NULL; }

bool ep_hold_block(unsigned block) {
    void (*hold)(unsigned) = NULL;
    memcpy(&hold, &(void*){dlsym(RTLD_DEFAULT, "ncclEpSimtHold")}, sizeof(hold));
    if (hold != NULL) hold(block);
    return hold != NULL;
}

void ep_release_block(void) {
    void (*release)(void) = NULL;
    memcpy(&release, &(void*){dlsym(RTLD_DEFAULT, "ncclEpSimtRelease")}, sizeof(release));
    if (release != NULL) release();
}

void ep_set_mishap(EpMishap mishap, bool happens) {
    static const char* const kNames[] = {
        [kEpNoImport] = "NCCLEP_SIMT_NO_IMPORT",
        [kEpNoMemory] = "NCCLEP_SIMT_NO_MEMORY",
        [kEpStopAtLaunch] = "NCCLEP_SIMT_STOP_AT_LAUNCH",
    };
    EP_REQUIRE(setenv(kNames[mishap], happens ? "1" : "0", 1) == 0);
}

void ep_sync(const EpEnv* env) { EP_CHECK_CUDA(cudaStreamSynchronize(env->stream)); }

// Without a GPU, where ranks share few cores, waiting ranks sleep. Elsewhere ranks must leave together, since some then
// measure the time of what they do next.
void ep_barrier(void) {
    enum { kTurns = 50, kPauseUs = 50 };
    MPI_Request all;
    int have_come = 0;
    MPI_Ibarrier(MPI_COMM_WORLD, &all);
    for (int i = 0; ep_on_hostsim() && have_come == 0; ++i) {
        MPI_Test(&all, &have_come, MPI_STATUS_IGNORE);
        if (i > kTurns) usleep(kPauseUs);
    }
    MPI_Wait(&all, MPI_STATUS_IGNORE);
}

void ep_open_streams(cudaStream_t* streams, unsigned count) {
    for (unsigned i = 0; i < count; ++i) {
        EP_REQUIRE_CUDA(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    }
}

void ep_close_streams(const cudaStream_t* streams, unsigned count) {
    for (unsigned i = 0; i < count; ++i) EP_CHECK_CUDA(cudaStreamDestroy(streams[i]));
}

static void put_variable(const char* name, const char* value) {
    EP_REQUIRE((value != NULL ? setenv(name, value, 1) : unsetenv(name)) == 0);
}

EpVariable ep_set_variable(const char* name, const char* value) {
    const char* set = getenv(name);
    const EpVariable variable = {name, set != NULL ? strdup(set) : NULL};
    put_variable(name, value);
    return variable;
}

void ep_restore_variable(EpVariable* variable) {
    put_variable(variable->name, variable->before);
    free(variable->before);
}

void ep_in_threads(void* (*work)(void* argument), void* arguments, size_t bytes, size_t count) {
    enum { kMost = 4 };
    pthread_t threads[kMost];
    EP_REQUIRE(count <= kMost);
    for (size_t i = 0; i < count; ++i) {
        EP_REQUIRE(pthread_create(&threads[i], NULL, work, (char*)arguments + i * bytes) == 0);
    }
    for (size_t i = 0; i < count; ++i) EP_REQUIRE(pthread_join(threads[i], NULL) == 0);
}
