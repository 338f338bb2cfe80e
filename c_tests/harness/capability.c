// Which modes the backend of this process has. Only the backend is asked: a guess by the kind of
// device would let a mode that was lost pass for one that never was.
#include "harness.h"

enum { kProbeTokenBytes = 64 };

const ncclEpAlgorithm_t kEpAlgorithms[2] = {NCCL_EP_ALGO_LOW_LATENCY, NCCL_EP_ALGO_HIGH_THROUGHPUT};

// A whole group and handle: a backend may refuse the mode at either.
static ncclResult_t open_ht(const EpEnv* env) {
    const ncclEpGroupConfig_t config =
        ep_group_config(NCCL_EP_ALGO_HIGH_THROUGHPUT, (unsigned)env->size, 1, kProbeTokenBytes);
    ncclEpGroup_t group = NULL;
    ncclResult_t result = ncclEpCreateGroup(&group, env->comm, &config, env->stream, NULL, NULL);
    if (result != ncclSuccess) return result;
    const int64_t id = 0;
    void* ids = ep_device_upload(&id, sizeof(id));
    EpView view;
    ep_view_2d(&view, ids, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, 1, 1);
    ncclEpHandle_t handle = NULL;
    result = ncclEpCreateHandle(&handle, group, &view.tensor, NULL, 0, NULL, env->stream, false);
    if (result == ncclSuccess) EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    EP_REQUIRE_NCCL(ncclEpGroupDestroy(group, env->stream));
    ep_device_free(ids);
    return result;
}

bool ep_has_high_throughput(const EpEnv* env) {
    static enum { kUnknown, kYes, kNo } answer = kUnknown;
    if (answer == kUnknown) {
        const ncclResult_t result = open_ht(env);
        answer = result == ncclSuccess ? kYes : kNo;
        // ncclInvalidUsage is how a backend says that it has no such mode.
        if (result != ncclSuccess && result != ncclInvalidUsage) EP_CHECK_NCCL(result);
    }
    return answer == kYes;
}

unsigned ep_num_algorithms(const EpEnv* env) {
    if (ep_has_high_throughput(env)) return 2;
    ep_skip_high_throughput();
    return 1;
}

ncclEpAlgorithm_t ep_algorithm_for_any_case(const EpEnv* env) { return kEpAlgorithms[ep_num_algorithms(env) - 1]; }
