// What the programs that call the first release's interface share besides base.h: its modes, groups and tensor
// descriptors.
//
// Usable from C11 and C++17. Of the interface it calls the ten entry points of the first release alone, so a program
// built on it also runs with another libnccl_ep.so of the same ABI.
#pragma once

#include <nccl_ep.h>

#include "base.h"

__BEGIN_DECLS

// The modes that this backend has: the first ep_num_algorithms of this table. Where high throughput
// is missing, each call of the function counts it as skipped.
extern const ncclEpAlgorithm_t kEpAlgorithms[2];
unsigned ep_num_algorithms(const EpEnv* env);
// A case that runs with each of them, as `algorithm`.
#define EP_TEST_EACH(name)                                                         \
    static void name##_in(EpEnv* env, ncclEpAlgorithm_t algorithm);                \
    EP_TEST(name) {                                                                \
        const unsigned modes = ep_num_algorithms(env);                             \
        for (unsigned i = 0; i < modes; ++i) name##_in(env, kEpAlgorithms[i]);     \
    }                                                                              \
    static void name##_in(__attribute__((unused)) EpEnv* env, ncclEpAlgorithm_t algorithm)
// High throughput if the backend has it, else low latency: for cases that are not about a mode.
ncclEpAlgorithm_t ep_algorithm_for_any_case(const EpEnv* env);
// ---- Groups and tensors (tensor.c)

// Callbacks for ncclEpCreateGroup that count live allocations: ep_counted_live() is 0 again once
// the group and all its tensors are gone, or something leaked or foreign memory was freed.
cudaError_t ep_counted_alloc(void** device, size_t bytes);
cudaError_t ep_counted_free(void* device);
int64_t ep_counted_live(void);

// A group with automatic settings for the rest of the configuration.
ncclEpGroup_t ep_group_create(const EpEnv* env, ncclEpAlgorithm_t algorithm, unsigned num_experts,
                              unsigned max_tokens_per_rank, unsigned token_size_bytes);
ncclEpGroupConfig_t ep_group_config(ncclEpAlgorithm_t algorithm, unsigned num_experts,
                                    unsigned max_tokens_per_rank, unsigned token_size_bytes);

// Tensors of ncclEpTensorCreate; release them with ncclEpTensorDestroy.
ncclNDTensor_t ep_tensor_1d(ncclEpGroup_t group, ncclDataType_t datatype, ncclEpTensorTag_t tag, unsigned size0);
ncclNDTensor_t ep_tensor_2d(ncclEpGroup_t group, ncclDataType_t datatype, ncclEpTensorTag_t tag,
                            unsigned size0, unsigned size1);
ncclNDTensor_t ep_tensor_3d(ncclEpGroup_t group, ncclDataType_t datatype, ncclEpTensorTag_t tag,
                            unsigned size0, unsigned size1, unsigned size2);

// A descriptor made by hand over memory of the caller. The arrays live in the view itself, so it
// must not be copied or moved while its descriptor is in use.
typedef struct {
    ncclNDTensor_t tensor;
    unsigned sizes[5];
    unsigned strides[5];
} EpView;
void ep_view_1d(EpView* view, void* data, ncclDataType_t datatype, ncclEpTensorTag_t tag, unsigned size0);
void ep_view_2d(EpView* view, void* data, ncclDataType_t datatype, ncclEpTensorTag_t tag,
                unsigned size0, unsigned size1);
void ep_view_3d(EpView* view, void* data, ncclDataType_t datatype, ncclEpTensorTag_t tag,
                unsigned size0, unsigned size1, unsigned size2);

size_t ep_tensor_elements(const ncclNDTensor_t* tensor);
size_t ep_tensor_bytes(const ncclNDTensor_t* tensor);
void ep_tensor_upload(const ncclNDTensor_t* tensor, const void* host);
void ep_tensor_download(const ncclNDTensor_t* tensor, void* host);
void ep_tensor_fill(const ncclNDTensor_t* tensor, int byte);

// ---- Calls that many tests make alike

// A handle for ids [tokens, top_k] in device memory, without a counter.
ncclResult_t ep_handle_create(ncclEpHandle_t* handle, ncclEpGroup_t group, void* ids,
                              unsigned tokens, unsigned top_k, cudaStream_t stream);
// Destroys a handle and forgets it.
ncclResult_t ep_handle_destroy(ncclEpHandle_t* handle);
// ncclEpGetAsyncError, which must succeed.
ncclResult_t ep_group_state(ncclEpGroup_t group);

__END_DECLS
