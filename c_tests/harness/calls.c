// Calls that many tests make alike; see harness.h.
#include "harness.h"

// Not one of the first release's entry points.
#pragma weak ncclEpGetAsyncError

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
