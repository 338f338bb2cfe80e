// Groups on two communicators, one after the other, and with ranks that come late; on one communicator test_stress has
// two at once.
#define _GNU_SOURCE  // RTLD_DEFAULT, usleep
#include <dlfcn.h>
#include <unistd.h>

#include "harness/nodes.h"
#include "suites/lifecycle/lifecycle.h"

// Besides the common communicator, even and odd ranks have one each.
EP_TEST(groups_on_two_communicators) {
    Place half_place = place_of(env);
    EP_REQUIRE_NCCL(ncclCommSplit(env->comm, env->rank % 2, env->rank, &half_place.comm, NULL));
    Trip whole = open_trip(ep_algorithm_for_any_case(env), place_of(env));
    Trip half = open_trip(NCCL_EP_ALGO_LOW_LATENCY, half_place);
    EP_CHECK_EQ_I64(half.rank, env->rank / 2);
    for (int round = 0; round < 3; ++round) {
        EP_CHECK_NCCL(start_dispatch(&whole));
        EP_CHECK_NCCL(start_dispatch(&half));
        EP_CHECK_NCCL(start_combine(&whole));
        EP_CHECK_NCCL(start_combine(&half));
        EP_CHECK(came_back(&whole) && came_back(&half));
    }
    EP_CHECK(close_trip(&half));
    EP_CHECK_NCCL(ncclCommDestroy(half_place.comm));
    finish_trip(&whole);
}

// How many communicators the library has made; NCCL's stand-in counts them.
static uint64_t communicators_made(void) {
    uint64_t (*made)(void) = NULL;
    memcpy(&made, &(void*){dlsym(RTLD_DEFAULT, "ncclEpHostsimCommunicators")}, sizeof(made));
    return made != NULL ? made() : 0;
}

static void make_groups_over(const Place* place, uint64_t most) {
    const uint64_t before = communicators_made();
    for (int i = 0; i < 3; ++i) {
        Trip trips[2];
        for (size_t j = 0; j < COUNT(trips); ++j) trips[j] = open_trip(NCCL_EP_ALGO_LOW_LATENCY, *place);
        for (size_t j = 0; j < COUNT(trips); ++j) EP_CHECK(make_trip(&trips[j]) && close_trip(&trips[j]));
    }
    EP_CHECK(communicators_made() - before <= most);
}

// Over nodes a group takes over the communicator of an earlier one, if that one has ended and had the same ranks.
EP_TEST(groups_take_over_communicators) {
    Place place = place_of(env);
    make_groups_over(&place, 2);
    make_groups_over(&place, 0);
    EP_REQUIRE_NCCL(ncclCommSplit(env->comm, env->rank % 2, env->rank, &place.comm, NULL));
    make_groups_over(&place, 2);
    EP_CHECK_NCCL(ncclCommDestroy(place.comm));
}

// The first rank that `rank` maps the window of, or itself if it is alone on its node.
static int first_mapped(const EpEnv* env, int rank) {
    for (int other = 0; other < env->size; ++other) {
        if (other != rank && ep_node_distance((unsigned)rank, (unsigned)other) == 0) return other;
    }
    return rank;
}

// Only the CPU build can refuse a mapping on demand; elsewhere the group is created.
// That driver also ends a process that frees its memory before the others have unmapped it.
EP_TEST(group_that_one_rank_cannot_map) {
    const int last = env->size - 1;
    const bool is_last = env->rank == last;
    const int mapped = first_mapped(env, last);
    const bool refuses = mapped != last && ep_on_cpu_build();
    char text[64];
    snprintf(text, sizeof(text), "cannot map rank %d's window", mapped);
    const ncclEpGroupConfig_t config = ep_group_config(NCCL_EP_ALGO_LOW_LATENCY, (unsigned)env->size, kTokens, 64);
    ncclEpGroup_t group = NULL;
    if (is_last) ep_set_mishap(kEpNoImport, true);
    const ncclResult_t result = ncclEpCreateGroup(&group, env->comm, &config, env->stream, NULL, NULL);
    ep_set_mishap(kEpNoImport, false);
    if (refuses) {
        EP_CHECK_EQ_I64(result, ncclRemoteError);
        EP_CHECK_STR_CONTAINS(ep_last_error(), text);
        EP_CHECK(group == NULL);
    } else {
        EP_CHECK_NCCL(result);
        EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
    }
    Trip trip = open_trip(NCCL_EP_ALGO_LOW_LATENCY, place_of(env));
    finish_trip(&trip);
}

// Ranks that wait for a late one query the stream now and then; the caller must see no trace of that.
EP_TEST(one_rank_is_late) {
    enum { kLateMicroseconds = 20000 };
    for (int late = 0; late < env->size; ++late) {
        if (env->rank == late) usleep(kLateMicroseconds);
        Trip trip = open_trip(ep_algorithm_for_any_case(env), place_of(env));
        EP_CHECK_CUDA(cudaGetLastError());
        finish_trip(&trip);
        EP_CHECK_CUDA(cudaGetLastError());
    }
}

// No window of one size serves a group of another, so those of groups that have ended must be gone.
EP_TEST(groups_of_many_sizes) {
    enum { kSizes = 6, kFewestRows = 32, kRowBytes = 4096 };
    size_t left = 0;
    for (unsigned i = 0; i < kSizes; ++i) {
        ncclEpGroup_t group = ep_group_create(env, NCCL_EP_ALGO_LOW_LATENCY, (unsigned)env->size,
                                              kFewestRows << i, kRowBytes);
        EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
        // NCCL on GPUs keeps some of its own.
        if (i == 0 || !ep_on_hostsim()) {
            left = ep_free_bytes();
        } else {
            EP_CHECK_EQ_U64(ep_free_bytes(), left);
        }
    }
}

// What the library keeps from one group to the next is lost with the context. A new context, often
// at the same address, starts from nothing.
EP_TEST_LAST(groups_after_a_reset) {
    for (int round = 0; round < 2; ++round) {
        Trip trip = open_trip(ep_algorithm_for_any_case(env), place_of(env));
        finish_trip(&trip);
        if (round == 1) break;
        EP_REQUIRE_NCCL(ncclCommDestroy(env->comm));
        EP_REQUIRE_CUDA(cudaStreamDestroy(env->stream));
        EP_REQUIRE_CUDA(cudaDeviceReset());
        ep_init_device(env);
    }
}

// What the caller does by mistake must not harm the process: threads of the library look at groups at any moment.
EP_TEST_LAST(a_reset_beside_groups) {
    enum { kLookedAgainUs = 100000 };
    const unsigned num_algorithms = ep_num_algorithms(env);
    for (unsigned i = 0; i < num_algorithms; ++i) {
        Trip trip = open_trip(kEpAlgorithms[i], place_of(env));
        EP_CHECK(make_trip(&trip));
        EP_REQUIRE(MPI_Barrier(MPI_COMM_WORLD) == MPI_SUCCESS);
        EP_REQUIRE_CUDA(cudaDeviceReset());
        usleep(kLookedAgainUs);
        const ncclResult_t state = ep_group_state(trip.group);
        // The CPU backend has no device that could be lost.
        if (ep_num_nodes() > 1 && !ep_on_host_backend()) {
            EP_CHECK_EQ_I64(state, ncclUnhandledCudaError);
            EP_CHECK_STR_CONTAINS(ep_last_error(), "the device was reset");
        }
        EP_CHECK_NCCL(ncclEpHandleDestroy(trip.handle));
        const ncclResult_t ended = ncclEpGroupDestroy(trip.group, NULL);
        EP_CHECK(ended == ncclSuccess || ended == ncclUnhandledCudaError);
        (void)destroy_tensors(&trip, NULL);
        EP_REQUIRE(MPI_Barrier(MPI_COMM_WORLD) == MPI_SUCCESS);
        // NCCL's own ends badly behind a reset (2.28).
        if (ep_on_hostsim()) EP_REQUIRE_NCCL(ncclCommDestroy(env->comm));
        ep_init_device(env);
        trip = open_trip(kEpAlgorithms[i], place_of(env));
        finish_trip(&trip);
    }
}
