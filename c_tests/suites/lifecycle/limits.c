// Limits of the operating system for a process: exceeding one is an error with a text.
#include <sys/resource.h>
#include <unistd.h>

#include "suites/lifecycle/lifecycle.h"

// Sets the soft limit and returns the previous one.
static rlim_t set_limit(int resource, rlim_t value) {
    struct rlimit limit;
    EP_REQUIRE(getrlimit(resource, &limit) == 0);
    const rlim_t before = limit.rlim_cur;
    limit.rlim_cur = value;
    EP_REQUIRE(setrlimit(resource, &limit) == 0);
    return before;
}

static bool says(const char* text) { return strstr(ep_last_error(), text) != NULL; }

// A dispatch whose message is larger than the limit allows.
static void dispatch_too_much(EpEnv* env) {
    enum { kRows = 64, kColumns = 2048 };
    const unsigned experts = (unsigned)env->size;
    ncclEpGroup_t group = ep_group_create(env, NCCL_EP_ALGO_LOW_LATENCY, experts, kRows, kColumns * 2);
    const unsigned capacity = kRows * experts;
    void* ids = ep_device_alloc(kRows * sizeof(int64_t));
    void* rows = ep_device_alloc(kRows * kColumns * 2);
    void* packed = ep_device_alloc((size_t)capacity * kColumns * 2);
    EpView in, out;
    ep_view_2d(&in, rows, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kRows, kColumns);
    ep_view_3d(&out, packed, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, 1, capacity, kColumns);
    const ncclNDTensor_t* inputs[] = {&in.tensor};
    ncclNDTensor_t* outputs[] = {&out.tensor};
    ncclEpHandle_t handle = NULL;
    EP_REQUIRE_NCCL(ep_handle_create(&handle, group, ids, kRows, 1, env->stream));
    EP_CHECK_NCCL(ncclEpDispatch(handle, inputs, 1, outputs, 1, NULL, 0, 0, NULL, env->stream));
    ep_sync(env);
    EP_CHECK_RESULT(ep_group_state(group), ncclSystemError);
    EP_CHECK(says("ncclEpDispatch (low latency): a message is longer than the limit for files"));
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
    ep_device_free(ids);
    ep_device_free(rows);
    ep_device_free(packed);
}

// `ulimit -f`: the ranks of the CPU backend share memory through a file.
EP_TEST(a_limit_for_files) {
    if (!ep_on_host_backend()) return;
    const rlim_t before = set_limit(RLIMIT_FSIZE, 1 << 20);
    const unsigned num_algorithms = ep_num_algorithms(env);
    for (unsigned i = 0; i < num_algorithms; ++i) {
        Trip trip = open_trip(kEpAlgorithms[i], place_of(env));
        finish_trip(&trip);
    }
    dispatch_too_much(env);
    // No room on the last rank.
    const bool is_last = env->rank == env->size - 1;
    (void)set_limit(RLIMIT_FSIZE, is_last ? 4096 : before);
    const ncclEpGroupConfig_t config = ep_group_config(NCCL_EP_ALGO_LOW_LATENCY, (unsigned)env->size, 4, 64);
    ncclEpGroup_t group = NULL;
    EP_CHECK_RESULT(ncclEpCreateGroup(&group, env->comm, &config, env->stream, NULL, NULL),
                    is_last ? ncclSystemError : ncclRemoteError);
    EP_CHECK(says("the limit for files (ulimit -f) leaves no room for shared windows"));
    EP_CHECK(group == NULL);
    (void)set_limit(RLIMIT_FSIZE, before);
}

static rlim_t address_space(void) {
    unsigned long pages = 0;
    FILE* file = fopen("/proc/self/statm", "r");
    EP_REQUIRE(file != NULL && fscanf(file, "%lu", &pages) == 1);
    fclose(file);
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

// `ulimit -v`: tokens without ids take no bytes, so their number is not limited by memory.
EP_TEST_HT(tokens_without_ids_cost_nothing) {
    if (!ep_on_host_backend()) return;
    const ncclEpGroupConfig_t config =
        ep_group_config(NCCL_EP_ALGO_HIGH_THROUGHPUT, (unsigned)env->size, NCCL_EP_AUTO, 64);
    ncclEpGroup_t group = NULL;
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group, env->comm, &config, env->stream, NULL, NULL));
    const unsigned most = (unsigned)INT32_MAX / (unsigned)env->size;
    const rlim_t before = set_limit(RLIMIT_AS, address_space() + ((rlim_t)1 << 30));
    ncclEpHandle_t handle = NULL;
    EP_CHECK_NCCL(ep_handle_create(&handle, group, NULL, most, 0, env->stream));
    unsigned rows = 77;
    EP_CHECK_NCCL(ncclEpHandleGetNumRecvTokens(handle, &rows));
    EP_CHECK_EQ_I64(rows, 0);
    (void)set_limit(RLIMIT_AS, before);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}
