// Groups and tensor descriptors. Two kinds of descriptors are in use by programs: those of ncclEpTensorCreate, which
// own their memory, and those that a program fills field by field.
#include <stdatomic.h>

#include "harness.h"

// Not one of the first release's entry points.
#pragma weak ncclEpGetAsyncError

static atomic_llong g_counted_live;

cudaError_t ep_counted_alloc(void** device, size_t bytes) {
    const cudaError_t result = cudaMalloc(device, bytes);
    if (result == cudaSuccess && *device != NULL) atomic_fetch_add(&g_counted_live, 1);
    return result;
}

cudaError_t ep_counted_free(void* device) {
    if (device != NULL) atomic_fetch_sub(&g_counted_live, 1);
    return cudaFree(device);
}

int64_t ep_counted_live(void) { return atomic_load(&g_counted_live); }

ncclEpGroupConfig_t ep_group_config(ncclEpAlgorithm_t algorithm, unsigned num_experts,
                                    unsigned max_tokens_per_rank, unsigned token_size_bytes) {
    ncclEpGroupConfig_t config;
    memset(&config, 0, sizeof(config));
    config.version = 1;
    config.algorithm = algorithm;
    config.num_experts = num_experts;
    config.max_tokens_per_rank = max_tokens_per_rank;
    config.token_size_bytes = token_size_bytes;
    config.rdma_buffer_size = NCCL_EP_AUTO;
    config.num_qp_per_rank = NCCL_EP_AUTO;
    config.num_channels = NCCL_EP_AUTO;
    return config;
}

ncclEpGroup_t ep_group_create(const EpEnv* env, ncclEpAlgorithm_t algorithm, unsigned num_experts,
                              unsigned max_tokens_per_rank, unsigned token_size_bytes) {
    const ncclEpGroupConfig_t config = ep_group_config(algorithm, num_experts, max_tokens_per_rank, token_size_bytes);
    ncclEpGroup_t group = NULL;
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group, env->comm, &config, env->stream, NULL, NULL));
    return group;
}

ncclNDTensor_t ep_tensor_1d(ncclEpGroup_t group, ncclDataType_t datatype, ncclEpTensorTag_t tag, unsigned size0) {
    ncclNDTensor_t tensor;
    memset(&tensor, 0, sizeof(tensor));
    EP_REQUIRE_NCCL(ncclEpTensorCreate(group, &tensor, 1, datatype, tag, size0, 1, 1, 1, 1));
    return tensor;
}

ncclNDTensor_t ep_tensor_2d(ncclEpGroup_t group, ncclDataType_t datatype, ncclEpTensorTag_t tag,
                            unsigned size0, unsigned size1) {
    ncclNDTensor_t tensor;
    memset(&tensor, 0, sizeof(tensor));
    EP_REQUIRE_NCCL(ncclEpTensorCreate(group, &tensor, 2, datatype, tag, size0, size1, 1, 1, 1));
    return tensor;
}

ncclNDTensor_t ep_tensor_3d(ncclEpGroup_t group, ncclDataType_t datatype, ncclEpTensorTag_t tag,
                            unsigned size0, unsigned size1, unsigned size2) {
    ncclNDTensor_t tensor;
    memset(&tensor, 0, sizeof(tensor));
    EP_REQUIRE_NCCL(ncclEpTensorCreate(group, &tensor, 3, datatype, tag, size0, size1, size2, 1, 1));
    return tensor;
}

static void fill_view(EpView* view, void* data, ncclDataType_t datatype, ncclEpTensorTag_t tag, unsigned ndim) {
    memset(&view->tensor, 0, sizeof(view->tensor));
    for (size_t i = 0; i < 5; ++i) {
        view->sizes[i] = 1;
        view->strides[i] = 1;  // the reference calls a tensor contiguous if every stride is 1
    }
    view->tensor.version = 1;
    view->tensor.ndim = ndim;
    view->tensor.sizes = view->sizes;
    view->tensor.strides = view->strides;
    view->tensor.datatype = datatype;
    view->tensor.data = data;
    view->tensor.tag = tag;
    view->tensor.flags = NCCL_EP_TENSOR_FLAG_NONE;
}

void ep_view_1d(EpView* out, void* data, ncclDataType_t datatype, ncclEpTensorTag_t tag, unsigned size0) {
    fill_view(out, data, datatype, tag, 1);
    out->sizes[0] = size0;
}

void ep_view_2d(EpView* out, void* data, ncclDataType_t datatype, ncclEpTensorTag_t tag,
                unsigned size0, unsigned size1) {
    fill_view(out, data, datatype, tag, 2);
    out->sizes[0] = size0;
    out->sizes[1] = size1;
}

void ep_view_3d(EpView* out, void* data, ncclDataType_t datatype, ncclEpTensorTag_t tag,
                unsigned size0, unsigned size1, unsigned size2) {
    fill_view(out, data, datatype, tag, 3);
    out->sizes[0] = size0;
    out->sizes[1] = size1;
    out->sizes[2] = size2;
}

size_t ep_tensor_elements(const ncclNDTensor_t* tensor) {
    size_t elements = 1;
    for (unsigned i = 0; i < tensor->ndim; ++i) elements *= tensor->sizes[i];
    return elements;
}

size_t ep_tensor_bytes(const ncclNDTensor_t* tensor) {
    return ep_tensor_elements(tensor) * ep_datatype_size(tensor->datatype);
}

void ep_tensor_upload(const ncclNDTensor_t* tensor, const void* host) {
    ep_upload(tensor->data, host, ep_tensor_bytes(tensor));
}

void ep_tensor_download(const ncclNDTensor_t* tensor, void* host) {
    ep_download(host, tensor->data, ep_tensor_bytes(tensor));
}

void ep_tensor_fill(const ncclNDTensor_t* tensor, int byte) {
    const size_t bytes = ep_tensor_bytes(tensor);
    if (bytes > 0) EP_REQUIRE_CUDA(cudaMemset(tensor->data, byte, bytes));
}

// ---- Calls that many tests make alike

ncclResult_t ep_handle_create(ncclEpHandle_t* handle, ncclEpGroup_t group, void* ids,
                              unsigned tokens, unsigned top_k, cudaStream_t stream) {
    EpView view;
    ep_view_2d(&view, ids, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, tokens, top_k);
    return ncclEpCreateHandle(handle, group, &view.tensor, NULL, 0, NULL, stream, false);
}

ncclResult_t ep_handle_destroy(ncclEpHandle_t* handle) {
    const ncclEpHandle_t gone = *handle;
    *handle = NULL;
    return ncclEpHandleDestroy(gone);
}

ncclResult_t ep_group_state(ncclEpGroup_t group) {
    ncclResult_t state = ncclSuccess;
    EP_CHECK_NCCL(ncclEpGetAsyncError(group, &state));
    return state;
}

// ---- Which modes the backend of this process has. Only the backend is asked: a guess by the kind of device would let
// a mode that was lost pass for one that never was.

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
    ncclEpHandle_t handle = NULL;
    result = ep_handle_create(&handle, group, ids, 1, 1, env->stream);
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
