// Threads: another thread than its creator may use a group, and threads with a group each do not
// disturb one another. Only the main thread counts checks.
#include "suites/lifecycle/lifecycle.h"

// Trips in a thread, which then destroys the group.
typedef struct {
    int device;
    Trip* trip;
    int rounds;
    bool good;
} Job;

static void* run_job(void* argument) {
    Job* job = argument;
    job->good = cudaSetDevice(job->device) == cudaSuccess;
    for (int i = 0; i < job->rounds; ++i) job->good = make_trip(job->trip) && job->good;
    job->good = close_trip(job->trip) && job->good;
    return NULL;
}

// ---- Devices -----------------------------------------------------------------------------------

typedef struct {
    Trip* trip;
    bool good;
} Launch;

static void* launch_from_the_first_device(void* argument) {
    Launch* launch = argument;
    int device = -1;
    const bool launched = start_dispatch(launch->trip) == ncclSuccess;
    launch->good = launched && cudaStreamQuery(NULL) == cudaSuccess &&
                   cudaGetDevice(&device) == cudaSuccess && device == 0;
    return NULL;
}

// A thread that never chose a device has the first. The default stream of a call is that of the group's device even so:
// the operation waits for what is there, and the first device has nothing to do.
EP_TEST_EACH(default_stream_of_another_device) {
    Place place = place_of(env);
    place.stream = NULL;
    Trip trip = open_trip(algorithm, place);
    EpGate gate;
    ep_gate_close(&gate, NULL);
    Launch launch = {&trip, false};
    if (env->device != 0) {
        ep_in_threads(launch_from_the_first_device, &launch, sizeof(launch), 1);
        EP_CHECK(launch.good);
    } else {
        EP_CHECK_NCCL(start_dispatch(&trip));
    }
    ep_gate_open(&gate);
    EP_CHECK_NCCL(start_combine(&trip));
    EP_CHECK(came_back(&trip));
    EP_CHECK(close_trip(&trip));
}

// ---- Groups in threads -------------------------------------------------------------------------

// Which the main thread has made, and the threads destroy; in the next case threads make groups, too.
EP_TEST(two_threads_with_a_group_each) {
    const ncclEpAlgorithm_t algorithms[] = {NCCL_EP_ALGO_LOW_LATENCY, ep_algorithm_for_any_case(env)};
    Trip trips[2];
    Job jobs[2];
    for (int i = 0; i < 2; ++i) {
        Place place = place_of(env);
        EP_REQUIRE_CUDA(cudaStreamCreateWithFlags(&place.stream, cudaStreamNonBlocking));
        trips[i] = open_trip(algorithms[i], place);
        jobs[i] = (Job){.device = env->device, .trip = &trips[i], .rounds = 50};
        EP_CHECK(make_trip(&trips[i]));
    }
    ep_in_threads(run_job, jobs, sizeof(*jobs), COUNT(jobs));
    for (int i = 0; i < 2; ++i) {
        EP_CHECK(jobs[i].good);
        EP_CHECK_RESULT(ncclEpGroupDestroy(trips[i].group, env->stream), ncclInvalidArgument);
        EP_CHECK_CUDA(cudaStreamDestroy(trips[i].stream));
    }
}

// ---- Threads that make and destroy groups ------------------------------------------------------

typedef struct {
    EpEnv env;
    ncclEpAlgorithm_t algorithm;
    int rounds;
    bool good;
} Maker;

enum { kMakers = 2 };

// Each round has its own group with tensors and a handle.
static void* make_and_destroy(void* argument) {
    Maker* maker = argument;
    maker->good = cudaSetDevice(maker->env.device) == cudaSuccess;
    for (int i = 0; i < maker->rounds; ++i) {
        Trip trip = open_trip(maker->algorithm, place_of(&maker->env));
        maker->good = make_trip(&trip) && maker->good;
        maker->good = close_trip(&trip) && maker->good;
    }
    return NULL;
}

static void run_makers(void* argument, int rounds) {
    Maker* makers = argument;
    for (int i = 0; i < kMakers; ++i) makers[i].rounds = rounds;
    ep_in_threads(make_and_destroy, makers, sizeof(*makers), kMakers);
    for (int i = 0; i < kMakers; ++i) EP_CHECK(makers[i].good);
}

// Each of two threads has its own communicator, groups and stream; on the default stream CUDA would make them wait for
// each other. While one thread takes part in an exchange of all ranks, the other may free its memory; on another rank
// it is the other way round. So a wait for the whole device would never end. Memory that is freed later serves the next
// group and does not pile up: a window has 2 MiB or more.
EP_TEST(two_threads_make_and_destroy_groups) {
    enum { kWarmUp = 10, kRounds = 13, kMostBytes = 8 << 20 };
    if (ep_on_fake_nccl()) {
        ep_skip("communicators take turns here");
        return;
    }
    Maker makers[kMakers];
    for (int i = 0; i < kMakers; ++i) {
        makers[i].env = *env;
        makers[i].algorithm = i == 0 ? NCCL_EP_ALGO_LOW_LATENCY : ep_algorithm_for_any_case(env);
        EP_REQUIRE_NCCL(ncclCommSplit(env->comm, 0, env->rank, &makers[i].env.comm, NULL));
        EP_REQUIRE_CUDA(cudaStreamCreateWithFlags(&makers[i].env.stream, cudaStreamNonBlocking));
    }
    run_makers(makers, kWarmUp);
    const int descriptors = ep_open_descriptors();
    const int64_t kept = least_growth(run_makers, makers, kRounds);
#if !defined(__SANITIZE_ADDRESS__)  // it keeps freed memory for a while
    EP_CHECK(ep_open_descriptors() - descriptors <= kMakers);
    check_growth(kept, kMostBytes + kMakers * kRounds * bytes_kept_by_nccl(env));
#else
    (void)descriptors;
    (void)kept;
#endif
    for (int i = 0; i < kMakers; ++i) {
        EP_CHECK_NCCL(ncclCommDestroy(makers[i].env.comm));
        EP_CHECK_CUDA(cudaStreamDestroy(makers[i].env.stream));
    }
}

// ---- One process, two ranks --------------------------------------------------------------------

typedef struct {
    ncclUniqueId id;
    int rank;
    int device;
    bool good;
} Rank;

static void* run_rank(void* argument) {
    Rank* rank = argument;
    Place place = {NULL, NULL, NULL, NULL};
    EP_REQUIRE_CUDA(cudaSetDevice(rank->device));
    EP_REQUIRE_NCCL(ncclCommInitRank(&place.comm, 2, rank->id, rank->rank));
    EP_REQUIRE_CUDA(cudaStreamCreate(&place.stream));
    Trip trip = open_trip(NCCL_EP_ALGO_LOW_LATENCY, place);
    Job job = {.device = rank->device, .trip = &trip, .rounds = 20};
    run_job(&job);
    rank->good = job.good && ncclCommDestroy(place.comm) == ncclSuccess;
    EP_REQUIRE_CUDA(cudaStreamDestroy(place.stream));
    return NULL;
}

// The process plays both ranks of a communicator of its own, on two devices.
EP_TEST(two_ranks_in_one_process) {
    int devices = 0;
    EP_REQUIRE_CUDA(cudaGetDeviceCount(&devices));
    if (devices < 2 || env->rank != 0) return;
    Rank ranks[2];
    ncclUniqueId id;
    EP_REQUIRE_NCCL(ncclGetUniqueId(&id));
    for (int i = 0; i < 2; ++i) ranks[i] = (Rank){id, i, (env->device + i) % devices, false};
    ep_in_threads(run_rank, ranks, sizeof(*ranks), COUNT(ranks));
    for (int i = 0; i < 2; ++i) EP_CHECK(ranks[i].good);
}
