// What may be destroyed when, and who frees it: groups, handles, tensors and communicators in the orders that programs
// use, with their own allocation functions, on several communicators, streams and threads.
#include "suites/lifecycle/lifecycle.h"

// The first release's benchmark frees the ids before the handle.
EP_TEST_EACH(handle_destroyed_after_its_ids) {
    Trip trip = open_trip(algorithm, place_of(env));
    EP_CHECK(make_trip(&trip));
    EP_CHECK(destroy_tensors(&trip, trip.group));
    EP_CHECK_NCCL(ncclEpHandleDestroy(trip.handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(trip.group, env->stream));
}

EP_TEST_EACH(group_destroyed_before_its_handles) {
    Trip trip = open_trip(algorithm, place_of(env));
    EP_CHECK(make_trip(&trip));
    EP_CHECK_NCCL(ncclEpGroupDestroy(trip.group, env->stream));
    EP_CHECK_RESULT(start_dispatch(&trip), ncclInvalidUsage);
    EP_CHECK_NCCL(ncclEpHandleDestroy(trip.handle));
    EP_CHECK_RESULT(ncclEpHandleDestroy(trip.handle), ncclInvalidArgument);
    EP_CHECK(destroy_tensors(&trip, trip.group));
}

// Handles of one group are created and destroyed while others run operations.
EP_TEST_EACH(handles_come_and_go) {
    Trip trip = open_trip(algorithm, place_of(env));
    ncclEpHandle_t first = trip.handle;
    for (int round = 0; round < 10; ++round) {
        open_trip_handle(&trip);
        EP_CHECK(trip.handle != first);
        EP_CHECK(make_trip(&trip));
        EP_CHECK_NCCL(ncclEpHandleDestroy(trip.handle));
    }
    trip.handle = first;
    finish_trip(&trip);
}

EP_TEST(destroying_nothing) {
    EP_CHECK_NCCL(ncclEpGroupDestroy(NULL, env->stream));
    EP_CHECK_NCCL(ncclEpHandleDestroy(NULL));
    EP_CHECK_NCCL(ncclEpTensorDestroy(NULL, NULL));
    Trip trip = open_trip(NCCL_EP_ALGO_LOW_LATENCY, place_of(env));
    EP_CHECK_NCCL(ncclEpTensorDestroy(trip.group, NULL));
    finish_trip(&trip);
    EP_CHECK_RESULT(ncclEpGroupDestroy(trip.group, env->stream), ncclInvalidArgument);
}

int main(int argc, char** argv) {
    use_one_heap();
    return ep_main(argc, argv);
}
