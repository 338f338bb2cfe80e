// What groups leave behind in the process: descriptors, mappings, memory.
#define _GNU_SOURCE  // sysconf, usleep
#include <dirent.h>
#include <limits.h>
#include <malloc.h>
#include <unistd.h>

#include "harness/nodes.h"
#include "suites/lifecycle/lifecycle.h"

// fake_nccl/, which has one node, lacks them.
#pragma weak ncclGroupStart
#pragma weak ncclGroupEnd
#pragma weak ncclSend
#pragma weak ncclRecv

// Those that can be read. The stand-ins keep the addresses of freed memory, without access, so that its use shows.
static int mappings(void) {
    FILE* file = fopen("/proc/self/maps", "r");
    EP_REQUIRE(file != NULL);
    char line[4096 + 100];  // a path and what stands before it
    int count = 0;
    while (fgets(line, sizeof(line), file) != NULL) count += strstr(line, " ---p ") == NULL;
    fclose(file);
    return count;
}

// One heap for all threads, before any starts: NCCL's would have one each, and what is alive in them would keep much
// freed memory.
int main(int argc, char** argv) {
    (void)mallopt(M_ARENA_MAX, 1);
    return ep_main(argc, argv);
}

// Without what the C library keeps of freed memory.
static int64_t resident_bytes(void) {
    (void)malloc_trim(0);
    FILE* file = fopen("/proc/self/statm", "r");
    EP_REQUIRE(file != NULL);
    long total = 0;
    long resident = 0;
    EP_REQUIRE(fscanf(file, "%ld %ld", &total, &resident) == 2);
    fclose(file);
    return (int64_t)resident * sysconf(_SC_PAGESIZE);
}

static bool is_of_library(const char* thread) {
    static const char kPrefix[] = "nccl-ep-";
    char path[300];
    char name[sizeof(kPrefix)] = "";
    snprintf(path, sizeof(path), "/proc/self/task/%s/comm", thread);
    FILE* file = fopen(path, "r");
    if (file == NULL) return false;  // it has just ended
    const size_t got = fread(name, 1, sizeof(kPrefix) - 1, file);
    fclose(file);
    return got == sizeof(kPrefix) - 1 && strcmp(name, kPrefix) == 0;
}

static int threads_of_library(void) {
    DIR* directory = opendir("/proc/self/task");
    EP_REQUIRE(directory != NULL);
    int count = 0;
    for (struct dirent* it = readdir(directory); it != NULL; it = readdir(directory)) {
        count += is_of_library(it->d_name);
    }
    closedir(directory);
    return count;
}

// Between nodes a group's communicator may end after its group, by threads of the library and of NCCL, which take the
// name of the thread that starts them. So does CUDA's thread for host functions, which stays: on one node fake_nccl/
// starts it in a thread of the library. Returns how many stay: those of NCCL, for communicators that are kept.
static int wait_for_late_ends(void) {
    enum { kPauseUs = 1000, kPauses = 20000, kStill = 2000 };
    if (ep_num_nodes() == 1) return 0;
    const bool is_kept = !ep_on_hostsim();
    int count = threads_of_library();
    for (int i = 0, still = 0; i < kPauses && count > 0 && still < kStill; ++i) {
        usleep(kPauseUs);
        const int now = threads_of_library();
        still = is_kept && now == count ? still + 1 : 0;
        count = now;
    }
    if (!is_kept) EP_CHECK_EQ_I64(count, 0);
    return count;
}

int64_t least_growth(void (*batch)(void* context, int rounds), void* context, int rounds) {
    int64_t least = INT64_MAX;
    int fewest = INT_MAX;  // more threads; a batch whose groups overlap more than before keeps more communicators
    int kept = wait_for_late_ends();
    for (int i = 0; i < kBatches; ++i) {
        const int64_t resident = resident_bytes();
        batch(context, rounds);
        const int now = wait_for_late_ends();
        if (now - kept < fewest) fewest = now - kept;
        kept = now;
        const int64_t growth = resident_bytes() - resident;
        if (growth < least) least = growth;
    }
    EP_CHECK(fewest <= 0);
    return least > 0 ? least : 0;
}

void check_growth(int64_t growth, int64_t most) { EP_CHECK_EQ_I64(growth > most ? growth - most : 0, 0); }

// A message to each rank of another node and one from there.
static void exchange_with_other_nodes(const EpEnv* env, ncclComm_t comm, uint32_t* words) {
    EP_REQUIRE_NCCL(ncclGroupStart());
    for (int rank = 0; rank < env->size; ++rank) {
        if (ep_node_of((unsigned)rank) == ep_node_of((unsigned)env->rank)) continue;
        EP_REQUIRE_NCCL(ncclSend(words, 1, ncclUint32, rank, comm, env->stream));
        EP_REQUIRE_NCCL(ncclRecv(words + 1 + rank, 1, ncclUint32, rank, comm, env->stream));
    }
    EP_REQUIRE_NCCL(ncclGroupEnd());
    EP_REQUIRE_CUDA(cudaStreamSynchronize(env->stream));
}

static void use_communicators(void* context, int count) {
    const EpEnv* env = context;
    uint32_t* words = ep_device_alloc((size_t)(1 + env->size) * sizeof(*words));
    for (int i = 0; i < count; ++i) {
        const ncclComm_t comm = ep_new_comm(env);
        exchange_with_other_nodes(env, comm, words);
        EP_REQUIRE_NCCL(ncclCommDestroy(comm));
    }
    ep_device_free(words);
}

int64_t bytes_kept_by_nccl(EpEnv* env) {
    enum { kRounds = 6 };
    if (ep_num_nodes() == 1) return 0;
    return least_growth(use_communicators, env, kRounds) / kRounds;
}

static void use_groups(void* context, int count) {
    const EpEnv* env = context;
    const unsigned num_algorithms = ep_num_algorithms(env);
    bool good = true;
    for (int i = 0; i < count; ++i) {
        Trip trip = open_trip(kEpAlgorithms[(unsigned)i % num_algorithms], place_of(env));
        good = make_trip(&trip) && good;
        good = close_trip(&trip) && good;
    }
    EP_CHECK(good);
}

EP_TEST(many_groups) {
    enum { kWarmUp = 20, kGroups = 50, kMostBytesPerGroup = 16 * 1024 };
    // Between nodes each group connects the ranks anew, which takes NCCL half a second.
    const bool on_nodes = ep_num_nodes() > 1;
    const int groups = on_nodes ? kGroups / 3 : kGroups;
    // The C library keeps the stacks of threads that have ended.
    const int few_mappings = on_nodes ? 2 * groups : 16;
    use_groups(env, kWarmUp);
    const int descriptors = ep_open_descriptors();
    const int mapped = mappings();
    const int64_t kept = least_growth(use_groups, env, groups);
    EP_CHECK_EQ_I64(ep_open_descriptors(), descriptors);
#if !defined(__SANITIZE_ADDRESS__)  // it keeps freed memory for a while
    EP_CHECK(mappings() - mapped <= few_mappings);
    check_growth(kept, groups * (kMostBytesPerGroup + bytes_kept_by_nccl(env)));
#else
    (void)mapped;
    (void)few_mappings;
    (void)kept;
#endif
}
