// Calls with one thing wrong. Each starts from valid tensors and changes one; it must be refused
// with the given text and leave the outputs untouched.
#include "suites/errors/errors.h"

enum { kUntouched = 0xa5 };

static EpView* find(TensorList* list, unsigned tag) {
    for (unsigned i = 0; i < list->count; ++i) {
        if (list->views[i].tensor.tag == tag) return &list->views[i];
    }
    return NULL;
}

static void remove_tensor(TensorList* list, const EpView* view) {
    unsigned kept = 0;
    for (unsigned i = 0; i < list->count; ++i) {
        if (list->items[i] != &view->tensor) list->items[kept++] = list->items[i];
    }
    list->count = kept;
}

static void add_tensor(TensorList* list, unsigned tag, void* data) {
    EpView* view = &list->views[list->count];
    ep_view_2d(view, data, ncclFloat32, NCCL_EP_TENSOR_TAG_NONE, 1, 1);
    view->tensor.tag = tag;
    list->items[list->count++] = &view->tensor;
}

static void change_tensor(EpView* view, Change change, unsigned value) {
    ncclNDTensor_t* tensor = &view->tensor;
    switch (change) {
        case kNullSizes: tensor->sizes = NULL; break;
        case kNullData: tensor->data = NULL; break;
        case kNdim: tensor->ndim = value; break;
        case kDatatype: tensor->datatype = (ncclDataType_t)value; break;
        case kTag: tensor->tag = value; break;
        case kSize0:
        case kSize1:
        case kSize2: view->sizes[change - kSize0] = value; break;
        case kStride0: view->strides[0] = value; break;
        case kShiftData: tensor->data = (char*)tensor->data + value; break;
        default: EP_REQUIRE(!"a change of a tensor");
    }
}

static void break_call(const Session* session, const BrokenCall* broken, CallTensors* tensors) {
    TensorList* list = &tensors->lists[broken->list];
    EpView* view = find(list, broken->tag);
    switch (broken->change) {
        case kNullList: list->null = true; break;
        case kNullItem: list->items[0] = NULL; break;
        case kAdd: add_tensor(list, broken->tag, session->weights); break;
        case kCount: list->count = broken->value; break;
        case kRemove:
            EP_REQUIRE(view != NULL);
            remove_tensor(list, view);
            break;
        default: EP_REQUIRE(view != NULL); change_tensor(view, broken->change, broken->value);
    }
}

// ---- What a refused call must not touch --------------------------------------------------------

typedef struct {
    void* data;
    size_t bytes;
} Output;

enum { kNumOutputs = 7, kMostBytes = 1 << 16 };

static void list_outputs(const Session* session, Output outputs[kNumOutputs]) {
    const size_t rows = (size_t)max_recv_rows(session);
    const size_t slabs = session->algorithm == NCCL_EP_ALGO_LOW_LATENCY ? kLocalExperts : 1;
    const Output all[kNumOutputs] = {
        {session->received, slabs * rows * kHidden * sizeof(uint16_t)},
        {session->received_ids, rows * kTopK * sizeof(int64_t)},
        {session->received_weights, rows * kTopK * sizeof(float)},
        {session->counter, kLocalExperts * sizeof(int32_t)},
        {session->combined, kTokens * kHidden * sizeof(uint16_t)},
        {session->gradients, kTokens * kTopK * sizeof(float)},
        {session->received_scales, slabs * rows * kScales * sizeof(float)},
    };
    memcpy(outputs, all, sizeof(all));
}

static void mark_outputs(const Session* session) {
    Output outputs[kNumOutputs];
    list_outputs(session, outputs);
    for (int i = 0; i < kNumOutputs; ++i) {
        EP_REQUIRE_CUDA(cudaMemset(outputs[i].data, kUntouched, outputs[i].bytes));
    }
}

static void check_outputs_untouched(const Session* session) {
    static unsigned char found[kMostBytes];
    static unsigned char expected[kMostBytes];
    memset(expected, kUntouched, sizeof(expected));
    Output outputs[kNumOutputs];
    list_outputs(session, outputs);
    ep_sync(session->env);
    for (int i = 0; i < kNumOutputs; ++i) {
        EP_REQUIRE(outputs[i].bytes <= sizeof(found));
        ep_download(found, outputs[i].data, outputs[i].bytes);
        EP_CHECK_EQ_BYTES(found, expected, outputs[i].bytes);
    }
}

void check_broken_calls(const Session* session, CallKind kind, const BrokenCall* calls, size_t num_calls) {
    static const char* const functions[] = {[kDispatch] = "ncclEpDispatch",  [kTokensOnly] = "ncclEpDispatch",
                                            [kForward] = "ncclEpDispatch",   [kCast] = "ncclEpDispatch",
                                            [kRankMajor] = "ncclEpDispatch", [kRankMajorForward] = "ncclEpDispatch",
                                            [kCombine] = "ncclEpCombine",    [kSummed] = "ncclEpCombine",
                                            [kBackward] = "ncclEpCombine",   [kCreateHandle] = "ncclEpCreateHandle"};
    mark_outputs(session);
    for (size_t i = 0; i < num_calls; ++i) {
        CallTensors tensors;
        valid_tensors(session, kind, &tensors);
        break_call(session, &calls[i], &tensors);
        EP_REFUSED(calls[i].id, make_call(session, kind, &tensors, 0), calls[i].code, "%s: %s", functions[kind],
                   calls[i].text);
        check_outputs_untouched(session);
    }
}
