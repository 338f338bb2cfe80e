// A library with the ten entry points of the first release and nothing behind them: what the
// drop-in test links its program with. Each call names itself on stderr and fails, so a run that
// reaches this library instead of the real one cannot pass. Like the first release it is built
// without a soname.
#include <nccl_ep.h>
#include <stdio.h>

#define REFUSE()                               \
    (fprintf(stderr, "dummy: %s\n", __func__), \
     ncclInternalError)

ncclResult_t ncclEpCreateGroup(ncclEpGroup_t* ep_group, ncclComm_t comm,
                               const ncclEpGroupConfig_t* config, cudaStream_t stream,
                               ncclEpAllocFn_t alloc_fn, ncclEpFreeFn_t free_fn) {
    (void)ep_group, (void)comm, (void)config, (void)stream, (void)alloc_fn, (void)free_fn;
    return REFUSE();
}

ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t ep_group, cudaStream_t stream) {
    (void)ep_group, (void)stream;
    return REFUSE();
}

ncclResult_t ncclEpTensorCreate(ncclEpGroup_t ep_group, ncclNDTensor_t* tensor, unsigned int ndim,
                                ncclDataType_t datatype, ncclEpTensorTag_t tag, unsigned int size0,
                                unsigned int size1, unsigned int size2, unsigned int size3,
                                unsigned int size4) {
    (void)ep_group, (void)tensor, (void)ndim, (void)datatype, (void)tag;
    (void)size0, (void)size1, (void)size2, (void)size3, (void)size4;
    return REFUSE();
}

ncclResult_t ncclEpTensorDestroy(ncclEpGroup_t ep_group, ncclNDTensor_t* tensor) {
    (void)ep_group, (void)tensor;
    return REFUSE();
}

ncclResult_t ncclEpCreateHandle(ncclEpHandle_t* handle, ncclEpGroup_t ep_group,
                                const ncclNDTensor_t* topk_idx,
                                ncclNDTensor_t* const* local_tensors,
                                unsigned int num_local_tensors, const ncclEpHandleConfig_t* config,
                                cudaStream_t stream, bool use_fp8) {
    (void)handle, (void)ep_group, (void)topk_idx, (void)local_tensors;
    (void)num_local_tensors, (void)config, (void)stream, (void)use_fp8;
    return REFUSE();
}

ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle) {
    (void)handle;
    return REFUSE();
}

ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclNDTensor_t* const* inputs,
                            unsigned int num_inputs, ncclNDTensor_t* const* outputs,
                            unsigned int num_outputs, ncclNDTensor_t* const* local_tensors,
                            unsigned int num_local_tensors, unsigned int send_only,
                            const ncclEpDispatchConfig_t* config, cudaStream_t stream) {
    (void)handle, (void)inputs, (void)num_inputs, (void)outputs, (void)num_outputs;
    (void)local_tensors, (void)num_local_tensors, (void)send_only, (void)config, (void)stream;
    return REFUSE();
}

ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclNDTensor_t* const* inputs,
                           unsigned int num_inputs, ncclNDTensor_t* const* outputs,
                           unsigned int num_outputs, ncclNDTensor_t* const* local_tensors,
                           unsigned int num_local_tensors, unsigned int send_only,
                           const ncclEpCombineConfig_t* config, cudaStream_t stream) {
    (void)handle, (void)inputs, (void)num_inputs, (void)outputs, (void)num_outputs;
    (void)local_tensors, (void)num_local_tensors, (void)send_only, (void)config, (void)stream;
    return REFUSE();
}

ncclResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t* config,
                            cudaStream_t stream) {
    (void)handle, (void)config, (void)stream;
    return REFUSE();
}

ncclResult_t ncclEpHandleGetNumRecvTokens(ncclEpHandle_t handle, unsigned int* num_recv_tokens) {
    (void)handle, (void)num_recv_tokens;
    return REFUSE();
}
