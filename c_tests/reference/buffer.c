// Guarded device memory and lists of tensors; see buffer.h.
#include "reference/buffer.h"

#include <stdlib.h>
#include <string.h>

void* ref_host_new(size_t bytes) {
    void* memory = calloc(bytes > 0 ? bytes : 1, 1);
    EP_REQUIRE(memory != NULL);
    return memory;
}

void* ref_host_poison(size_t bytes) {
    void* memory = ref_host_new(bytes);
    memset(memory, kRefPoison, bytes);
    return memory;
}

static size_t all_bytes_of(const RefBuffer* buffer) {
    return buffer->before + buffer->bytes + buffer->behind;
}

static RefBuffer buffer_between(size_t before, size_t bytes, size_t behind) {
    RefBuffer buffer = {NULL, bytes, before, behind};
    buffer.base = ep_device_alloc(all_bytes_of(&buffer));
    ref_buffer_poison(&buffer);
    return buffer;
}

RefBuffer ref_buffer_new(size_t bytes) {
    return buffer_between(kRefGuardBytes, bytes, kRefGuardBytes);
}

RefBuffer ref_buffer_new_input(size_t bytes) {
    return buffer_between(2 * kRefGuardBytes - bytes % kRefGuardBytes, bytes, 0);
}

void ref_buffer_free(RefBuffer* buffer) {
    if (buffer->base != NULL) ep_device_free(buffer->base);
    buffer->base = NULL;
    buffer->bytes = 0;
}

void* ref_buffer_data(const RefBuffer* buffer) { return buffer->base + buffer->before; }

void ref_buffer_poison(const RefBuffer* buffer) {
    EP_REQUIRE_CUDA(cudaMemset(buffer->base, kRefPoison, all_bytes_of(buffer)));
}

void ref_buffer_upload(const RefBuffer* buffer, const void* host) {
    ep_upload(ref_buffer_data(buffer), host, buffer->bytes);
}

bool ref_buffer_check(EpSite site, const RefBuffer* buffer, const void* expected) {
    const size_t all_bytes = all_bytes_of(buffer);
    unsigned char* got = ref_host_new(all_bytes);
    unsigned char* wanted = ref_host_poison(all_bytes);
    ep_download(got, buffer->base, all_bytes);
    if (buffer->bytes > 0) memcpy(wanted + buffer->before, expected, buffer->bytes);
    const bool passed = ep_check_eq_bytes(site, got, wanted, all_bytes);
    free(got);
    free(wanted);
    return passed;
}

void ref_list_init(RefList* list) { memset(list, 0, sizeof(*list)); }

void ref_list_add(RefList* list, void* data, ncclDataType_t datatype, ncclEpTensorTag_t tag,
                  unsigned num_sizes, const unsigned* sizes) {
    EP_REQUIRE(list->count < kRefMaxTensors && num_sizes <= 3);
    EpView* view = &list->views[list->count];
    ep_view_3d(view, data, datatype, tag, 1, 1, 1);
    view->tensor.ndim = num_sizes;
    memcpy(view->sizes, sizes, num_sizes * sizeof(*sizes));
    list->items[list->count++] = &view->tensor;
}

void ref_list_set_strides(RefList* list, const unsigned* strides) {
    EpView* view = &list->views[list->count - 1];
    memcpy(view->strides, strides, view->tensor.ndim * sizeof(*strides));
    list->strided[list->count - 1] = true;
}

static void set_strides(EpView* view, unsigned kind) {
    if (kind == 1) view->tensor.strides = NULL;
    if (kind != 2) return;
    unsigned stride = 1;
    for (unsigned i = view->tensor.ndim; i-- > 0;) {
        view->strides[i] = stride;
        stride *= view->sizes[i];
    }
}

// An empty tensor needs no memory.
static void drop_empty_data(EpView* view) {
    if (ep_tensor_elements(&view->tensor) == 0) view->tensor.data = NULL;
}

static void reverse(RefList* list) {
    for (unsigned i = 0; i < list->count / 2; ++i) {
        ncclNDTensor_t* item = list->items[i];
        list->items[i] = list->items[list->count - 1 - i];
        list->items[list->count - 1 - i] = item;
    }
}

// Nothing but the tag of such a tensor may be looked at.
static void add_unknown(RefList* list, unsigned tag) {
    if (list->count == kRefMaxTensors) return;
    EpView* view = &list->views[list->count];
    memset(view, kRefPoison, sizeof(*view));
    view->tensor.tag = tag;
    list->items[list->count++] = &view->tensor;
}

void ref_list_dress(RefList* list, unsigned variation) {
    for (unsigned i = 0; i < list->count; ++i) {
        if (!list->strided[i]) set_strides(&list->views[i], variation & 3u);
        if ((variation & 1u) != 0) drop_empty_data(&list->views[i]);
    }
    if ((variation & 8u) != 0) {
        add_unknown(list, NCCL_EP_TENSOR_TAG_NONE);
        add_unknown(list, NCCL_EP_TENSOR_TAG_TOKENS_PER_EXPERTS);
        add_unknown(list, 4711);
    }
    if ((variation & 4u) != 0) reverse(list);
}

ncclNDTensor_t* const* ref_list_outputs(const RefList* list) {
    static char garbage;
    return list->count > 0 ? list->items : (ncclNDTensor_t* const*)(void*)(&garbage + 1);
}

const ncclNDTensor_t* const* ref_list_inputs(const RefList* list) {
    return (const ncclNDTensor_t* const*)ref_list_outputs(list);
}

void ref_list_scrap(RefList* list) { memset(list, kRefPoison, sizeof(*list)); }

void ref_lists_dress(RefLists* lists, unsigned variation) {
    ref_list_dress(&lists->inputs, variation);
    ref_list_dress(&lists->outputs, variation);
    ref_list_dress(&lists->locals, variation);
}

ncclResult_t ref_lists_dispatch(RefLists* lists, ncclEpHandle_t handle, unsigned send_only,
                                const ncclEpDispatchConfig_t* config, cudaStream_t stream) {
    const ncclResult_t result = ncclEpDispatch(
        handle, ref_list_inputs(&lists->inputs), lists->inputs.count,
        ref_list_outputs(&lists->outputs), lists->outputs.count, ref_list_outputs(&lists->locals),
        lists->locals.count, send_only, config, stream);
    memset(lists, kRefPoison, sizeof(*lists));
    return result;
}

ncclResult_t ref_lists_combine(RefLists* lists, ncclEpHandle_t handle, unsigned send_only,
                               cudaStream_t stream) {
    const ncclResult_t result = ncclEpCombine(
        handle, ref_list_inputs(&lists->inputs), lists->inputs.count,
        ref_list_outputs(&lists->outputs), lists->outputs.count, ref_list_outputs(&lists->locals),
        lists->locals.count, send_only, NULL, stream);
    memset(lists, kRefPoison, sizeof(*lists));
    return result;
}
