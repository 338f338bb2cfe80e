// Device memory of the tests: poisoned, with guard zones on both sides, so that a stray write shows
// anywhere. And lists of tensors over it, in every form that callers may choose, overwritten as
// soon as the call has returned.
#ifndef C_TESTS_REFERENCE_BUFFER_H_
#define C_TESTS_REFERENCE_BUFFER_H_

#include "harness/harness.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { kRefPoison = 0xa5, kRefGuardBytes = 256, kRefMaxTensors = 8 };

typedef struct {
    unsigned char* base;  // of the guard zone before the data; device memory
    size_t bytes;         // of the data
    size_t before;        // of the guard zone before it
    size_t behind;        // of the one behind it
} RefBuffer;

// All bytes of a new buffer are poison.
RefBuffer ref_buffer_new(size_t bytes);
// For what a call reads: without a zone behind it, so that on the CPU to read there faults, as to
// write does (256-byte multiples are followed by a page that nobody may touch).
RefBuffer ref_buffer_new_input(size_t bytes);
void ref_buffer_free(RefBuffer* buffer);
void* ref_buffer_data(const RefBuffer* buffer);
void ref_buffer_poison(const RefBuffer* buffer);
// The data; the rest is left alone.
void ref_buffer_upload(const RefBuffer* buffer, const void* host);
// One check: the data is `expected`, and the guard zones are still poison.
bool ref_buffer_check(EpSite site, const RefBuffer* buffer, const void* expected);
#define REF_CHECK_BUFFER(buffer, expected) \
    (EP_REACHED, ref_buffer_check(EP_HERE(#buffer " == " #expected), (buffer), (expected)))

// Host memory of the tests; ends all processes if there is none. Released with free().
void* ref_host_new(size_t bytes);     // all zero
void* ref_host_poison(size_t bytes);  // all poison

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

// The lists of an operation, which is empty if all bytes are zero; dressed alike, and scrapped by
// the call.
typedef struct {
    RefList inputs, outputs, locals;
} RefLists;
void ref_lists_dress(RefLists* lists, unsigned variation);
ncclResult_t ref_lists_dispatch(RefLists* lists, ncclEpHandle_t handle, unsigned send_only,
                                const ncclEpDispatchConfig_t* config, cudaStream_t stream);
ncclResult_t ref_lists_combine(RefLists* lists, ncclEpHandle_t handle, unsigned send_only,
                               cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif  // C_TESTS_REFERENCE_BUFFER_H_
