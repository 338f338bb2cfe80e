// The C side of the ABI: what a C compiler sees (layout.h), and calls with little in them.
#include "suites/abi/layout.h"

#include <pthread.h>

EP_TEST(the_version_is_one_number) {
    int version = -1;
    int again = -2;
    EP_CHECK_NCCL(ncclEpGetVersion(&version));
    EP_CHECK_NCCL(ncclEpGetVersion(&again));
    EP_CHECK_EQ_I64(version, NCCL_EP_VERSION_CODE);
    EP_CHECK_EQ_I64(version, again);
}

// The first release's README declares such an object, which did not compile there.
EP_TEST(configuration_objects_can_be_declared) {
    const ncclEpCompleteConfig_t complete = {0};
    const ncclEpCombineConfig_t combine = {0};
    EP_CHECK_RESULT(ncclEpComplete(NULL, &complete, env->stream), ncclInvalidArgument);
    EP_CHECK_RESULT(ncclEpCombine(NULL, NULL, 0, NULL, 0, NULL, 0, 0, &combine, env->stream), ncclInvalidArgument);
}

static void* last_error_of_new_thread(void* length) {
    *(size_t*)length = strlen(ncclEpGetLastError());
    return NULL;
}

EP_TEST(the_last_error_belongs_to_its_thread) {
    EP_CHECK_RESULT(ncclEpGetVersion(NULL), ncclInvalidArgument);
    EP_CHECK_STR_CONTAINS(ncclEpGetLastError(), "ncclEpGetVersion");
    pthread_t thread;
    size_t length = 1;
    EP_REQUIRE(pthread_create(&thread, NULL, last_error_of_new_thread, &length) == 0);
    EP_REQUIRE(pthread_join(thread, NULL) == 0);
    EP_CHECK_EQ_U64(length, 0);
    EP_CHECK_STR_CONTAINS(ncclEpGetLastError(), "ncclEpGetVersion");
}
