// Groups, and lists of tensors; see lists.h.
#include "reference/lists.h"

#include "reference/mapped.h"

ncclEpGroup_t ref_group_new(const EpEnv* env, ncclEpAlgorithm_t algorithm, const RefShape* shape) {
    const size_t row_bytes = shape->hidden * ep_datatype_size(shape->datatype);
    ncclEpGroup_t group = ep_group_create(env, algorithm, shape->num_experts, shape->max_tokens, (unsigned)row_bytes);
    ref_mapped_close();
    if (algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT) ref_mapped_open(env, group, row_bytes);
    return group;
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

static void* rows_of(const RefList* outputs) {
    for (unsigned i = 0; i < outputs->count; ++i) {
        if (outputs->items[i]->tag == NCCL_EP_TENSOR_TAG_TOKENS) return outputs->items[i]->data;
    }
    return NULL;
}

ncclResult_t ref_lists_dispatch(RefLists* lists, ncclEpHandle_t handle, unsigned send_only,
                                const ncclEpDispatchConfig_t* config, cudaStream_t stream) {
    const ncclResult_t result = ncclEpDispatch(
        handle, ref_list_inputs(&lists->inputs), lists->inputs.count, ref_list_outputs(&lists->outputs),
        lists->outputs.count, ref_list_outputs(&lists->locals), lists->locals.count, send_only, config, stream);
    if (lists->view != NULL) *lists->view = rows_of(&lists->outputs);
    memset(lists, kRefPoison, sizeof(*lists));
    return result;
}

ncclResult_t ref_lists_combine(RefLists* lists, ncclEpHandle_t handle, unsigned send_only, cudaStream_t stream) {
    const ncclResult_t result = ncclEpCombine(
        handle, ref_list_inputs(&lists->inputs), lists->inputs.count, ref_list_outputs(&lists->outputs),
        lists->outputs.count, ref_list_outputs(&lists->locals), lists->locals.count, send_only, NULL, stream);
    memset(lists, kRefPoison, sizeof(*lists));
    return result;
}
