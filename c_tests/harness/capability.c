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

// Dispatches one row with a scale to expert 0 of this rank's own. The scale is the last thing that
// a backend may lack.
static ncclResult_t dispatch_a_scale(const EpEnv* env, ncclEpHandle_t handle) {
    enum { kBytes = 16 };
    const unsigned rows = (unsigned)env->size;
    void* memory = ep_device_alloc((size_t)2 * (rows + 1) * kBytes);
    EP_REQUIRE_CUDA(cudaMemset(memory, 0, (size_t)2 * (rows + 1) * kBytes));
    char* received = (char*)memory + 2 * kBytes;
    EpView tokens, scales, out, out_scales;
    ep_view_2d(&tokens, memory, ncclUint8, NCCL_EP_TENSOR_TAG_TOKENS, 1, kBytes);
    ep_view_2d(&scales, (char*)memory + kBytes, ncclFloat32, NCCL_EP_TENSOR_TAG_SCALES, 1, 1);
    ep_view_3d(&out, received, ncclUint8, NCCL_EP_TENSOR_TAG_TOKENS, 1, rows, kBytes);
    ep_view_3d(&out_scales, received + rows * kBytes, ncclFloat32, NCCL_EP_TENSOR_TAG_SCALES, 1,
               rows, 1);
    const ncclNDTensor_t* inputs[] = {&tokens.tensor, &scales.tensor};
    ncclNDTensor_t* outputs[] = {&out.tensor, &out_scales.tensor};
    const ncclResult_t result = ncclEpDispatch(handle, inputs, 2, outputs, 2, NULL, 0, 0, NULL,
                                               env->stream);
    ep_sync(env);
    ep_device_free(memory);
    return result;
}

static ncclResult_t try_scales(const EpEnv* env) {
    ncclEpGroup_t group = ep_group_create(env, NCCL_EP_ALGO_LOW_LATENCY, (unsigned)env->size, 1,
                                          kProbeTokenBytes);
    const int64_t id = env->rank;
    void* ids = ep_device_upload(&id, sizeof(id));
    EpView view;
    ep_view_2d(&view, ids, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, 1, 1);
    ncclEpHandle_t handle = NULL;
    EP_REQUIRE_NCCL(ncclEpCreateHandle(&handle, group, &view.tensor, NULL, 0, NULL, env->stream,
                                       false));
    const ncclResult_t result = dispatch_a_scale(env, handle);
    EP_CHECK_NCCL(ncclEpHandleDestroy(handle));
    EP_REQUIRE_NCCL(ncclEpGroupDestroy(group, env->stream));
    ep_device_free(ids);
    return result;
}

bool ep_has_quantised_rows(const EpEnv* env) {
    static enum { kUnknown, kYes, kNo } answer = kUnknown;
    if (answer == kUnknown) {
        const ncclResult_t result = try_scales(env);
        answer = result == ncclSuccess ? kYes : kNo;
        if (result != ncclSuccess && result != ncclInvalidUsage) EP_CHECK_NCCL(result);
    }
    return answer == kYes;
}

void ep_skip_high_throughput(void) { ep_skip("no high throughput on this backend"); }

unsigned ep_num_algorithms(const EpEnv* env) {
    if (ep_has_high_throughput(env)) return 2;
    ep_skip_high_throughput();
    return 1;
}

ncclEpAlgorithm_t ep_algorithm_for_any_case(const EpEnv* env) {
    return kEpAlgorithms[ep_num_algorithms(env) - 1];
}
