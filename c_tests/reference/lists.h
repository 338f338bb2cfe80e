// Groups of the first release's interface, and lists of tensors for its calls, in every form that callers may choose,
// overwritten as soon as the call has returned.
#pragma once

#include "harness/harness.h"
#include "reference/buffer.h"
#include "reference/routing.h"

__BEGIN_DECLS

enum { kRefMaxTensors = 8 };

ncclEpGroup_t ref_group_new(const EpEnv* env, ncclEpAlgorithm_t algorithm, const RefShape* shape);

// A list of tensors for one call. It must not be moved while in use.
typedef struct {
    EpView views[kRefMaxTensors];
    ncclNDTensor_t* items[kRefMaxTensors];
    bool strided[kRefMaxTensors];  // whether the view has strides of its own
    unsigned count;
} RefList;

void ref_list_init(RefList* list);
void ref_list_add(RefList* list, void* data, ncclDataType_t datatype, ncclEpTensorTag_t tag,
                  unsigned num_sizes, const unsigned* sizes);

// Gives the tensor that was added last strides of its own.
void ref_list_set_strides(RefList* list, const unsigned* strides);

// Sixteen ways to say the same: strides all ones, NULL or row-major; empty tensors with an address
// or without; the tensors in either order; tensors with tags that no call knows, or none.
void ref_list_dress(RefList* list, unsigned variation);

// The arguments for the call: an empty list is a garbage address with the count 0.
ncclNDTensor_t* const* ref_list_outputs(const RefList* list);
const ncclNDTensor_t* const* ref_list_inputs(const RefList* list);

// Overwrites the descriptors and the list itself: nothing may be read after the call.
void ref_list_scrap(RefList* list);

// The lists of an operation, which is empty if all bytes are zero; dressed alike, and scrapped by the call.
typedef struct {
    RefList inputs, outputs, locals;
    void** view;  // gets the address of the rows of a dispatch that are among the outputs, unless NULL
} RefLists;
void ref_lists_dress(RefLists* lists, unsigned variation);
ncclResult_t ref_lists_dispatch(RefLists* lists, ncclEpHandle_t handle, unsigned send_only,
                                const ncclEpDispatchConfig_t* config, cudaStream_t stream);
ncclResult_t ref_lists_combine(RefLists* lists, ncclEpHandle_t handle, unsigned send_only, cudaStream_t stream);

__END_DECLS
