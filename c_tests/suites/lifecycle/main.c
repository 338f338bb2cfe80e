// What may be destroyed when, and who frees it: groups, handles, tensors and communicators in the
// orders that programs use, with their own allocation functions, on several communicators, streams
// and threads.
#include "suites/lifecycle/lifecycle.h"

// The first release's benchmark frees the ids before the handle.
static void handle_destroyed_after_its_ids(EpEnv* env) {
    const unsigned num_algorithms = ep_num_algorithms(env);
    for (unsigned i = 0; i < num_algorithms; ++i) {
        Trip trip;
        open_trip(&trip, kEpAlgorithms[i], place_of(env));
        EP_CHECK(make_trip(&trip));
        EP_CHECK(destroy_tensors(&trip, trip.group));
        EP_CHECK_NCCL(ncclEpHandleDestroy(trip.handle));
        EP_CHECK_NCCL(ncclEpGroupDestroy(trip.group, env->stream));
    }
}

static void group_destroyed_before_its_handles(EpEnv* env) {
    const unsigned num_algorithms = ep_num_algorithms(env);
    for (unsigned i = 0; i < num_algorithms; ++i) {
        Trip trip;
        open_trip(&trip, kEpAlgorithms[i], place_of(env));
        EP_CHECK(make_trip(&trip));
        EP_CHECK_NCCL(ncclEpGroupDestroy(trip.group, env->stream));
        EP_CHECK_RESULT(start_dispatch(&trip, 0), ncclInvalidUsage);
        EP_CHECK_NCCL(ncclEpHandleDestroy(trip.handle));
        EP_CHECK_RESULT(ncclEpHandleDestroy(trip.handle), ncclInvalidArgument);
        EP_CHECK(destroy_tensors(&trip, trip.group));
    }
}

// Handles of one group are created and destroyed while others run operations.
static void handles_come_and_go(EpEnv* env) {
    const unsigned num_algorithms = ep_num_algorithms(env);
    for (unsigned i = 0; i < num_algorithms; ++i) {
        Trip trip;
        open_trip(&trip, kEpAlgorithms[i], place_of(env));
        ncclEpHandle_t first = trip.handle;
        for (int round = 0; round < 10; ++round) {
            open_trip_handle(&trip);
            EP_CHECK(trip.handle != first);
            EP_CHECK(make_trip(&trip));
            EP_CHECK_NCCL(ncclEpHandleDestroy(trip.handle));
        }
        trip.handle = first;
        EP_CHECK(make_trip(&trip));
        EP_CHECK(close_trip(&trip));
    }
}

// Destroying a handle abandons its staged operation; the group keeps working.
static void handle_destroyed_with_a_staged_operation(EpEnv* env) {
    Trip trip;
    open_trip(&trip, NCCL_EP_ALGO_LOW_LATENCY, place_of(env));
    for (int round = 0; round < 6; ++round) {
        EP_CHECK_NCCL(start_dispatch(&trip, 1));
        EP_CHECK_NCCL(ncclEpHandleDestroy(trip.handle));
        open_trip_handle(&trip);
        EP_CHECK(make_trip(&trip));
    }
    EP_CHECK(close_trip(&trip));
}

static void destroying_nothing(EpEnv* env) {
    EP_CHECK_NCCL(ncclEpGroupDestroy(NULL, env->stream));
    EP_CHECK_NCCL(ncclEpHandleDestroy(NULL));
    EP_CHECK_NCCL(ncclEpTensorDestroy(NULL, NULL));
    Trip trip;
    open_trip(&trip, NCCL_EP_ALGO_LOW_LATENCY, place_of(env));
    EP_CHECK_NCCL(ncclEpTensorDestroy(trip.group, NULL));
    EP_CHECK(make_trip(&trip));
    EP_CHECK(close_trip(&trip));
    EP_CHECK_RESULT(ncclEpGroupDestroy(trip.group, env->stream), ncclInvalidArgument);
}

int main(int argc, char** argv) {
    static const EpCase cases[] = {
        EP_CASE(handle_destroyed_after_its_ids),
        EP_CASE(group_destroyed_before_its_handles),
        EP_CASE(handles_come_and_go),
        EP_CASE(handle_destroyed_with_a_staged_operation),
        EP_CASE(destroying_nothing),
        EP_CASE(both_callbacks),
        EP_CASE(one_callback_alone),
        EP_CASE(tensors_outlive_group_and_communicator),
        EP_CASE(tensors_destroyed_twice),
        EP_CASE(descriptors_made_by_hand),
        EP_CASE(several_groups_on_one_communicator),
        EP_CASE(groups_on_two_communicators),
        EP_CASE(groups_take_over_communicators),
        EP_CASE(group_that_one_rank_cannot_map),
        EP_CASE(groups_on_any_stream),
        EP_CASE(groups_of_many_sizes),
        EP_CASE(one_rank_is_late),
        EP_CASE(calls_from_another_thread),
        EP_CASE(default_stream_of_another_device),
        EP_CASE(two_threads_with_a_group_each),
        EP_CASE(two_threads_make_and_destroy_groups),
        EP_CASE(two_ranks_in_one_process),
        EP_CASE(a_limit_for_files),
        EP_CASE_HT(tokens_without_ids_cost_nothing),
        EP_CASE(many_groups),
        EP_CASE(groups_after_a_reset),
        EP_CASE(a_reset_beside_groups),
    };
    use_one_heap();
    return ep_main(argc, argv, cases, COUNT(cases));
}
