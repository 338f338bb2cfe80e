// Calls with one thing wrong. Each starts from valid tensors and changes one as its refusal says; it must be refused
// with that text and leave the outputs untouched.
#include "suites/errors/errors.h"

enum { kUntouched = 0xa5 };

// The index of the name with which `text` begins.
static unsigned named(const char* const* names, unsigned count, const char* text) {
    unsigned found = 0;
    while (found < count && strncmp(text, names[found], strlen(names[found])) != 0) ++found;
    return found;
}

static unsigned tag_of(const char* text) {
    static const char* const kNames[] = {"*",      "TOKENS", "TOPK_IDX", "TOPK_WEIGHTS",
                                         "SCALES", "RECV_EXPERT_COUNTER_DEVICE", "RECV_EXPERT_COUNTER_HOST"};
    return named(kNames, COUNT(kNames), text);
}

// One that NCCL does not have for an unknown number.
static ncclDataType_t type_of(const char* text) {
    static const char* const kNames[] = {"int8",    "uint8",   "int32",    "uint32",     "int64",     "uint64",
                                         "float16", "float32", "float64",  "bfloat16",   "float8e4m3", "float8e5m2"};
    return (ncclDataType_t)named(kNames, COUNT(kNames), text);
}

static EpView* find(TensorList* list, unsigned tag) {
    for (unsigned i = 0; i < list->count; ++i) {
        if (list->views[i].tensor.tag == tag) return &list->views[i];
    }
    EP_REQUIRE(!"a tensor of the call");
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

static bool begins(const char* text, const char* with) { return strncmp(text, with, strlen(with)) == 0; }

// The field of a tensor gets the value that a text tells as got.
static void break_field(EpView* view, const char* field, const char* rule, const char* got) {
    ncclNDTensor_t* tensor = &view->tensor;
    const unsigned number = (unsigned)strtoul(got + (*got == '['), NULL, 10);
    const char* multiple = strstr(got, "multiple of ");
    if (begins(field, ".ndim")) tensor->ndim = number;
    else if (begins(field, ".datatype")) tensor->datatype = type_of(got);
    else if (begins(field, ".sizes[")) view->sizes[field[7] - '0'] = strstr(got, " bytes,") ? number / 2 : number;
    else if (begins(field, ".sizes")) tensor->sizes = NULL;
    else if (begins(field, ".strides")) view->strides[0] = number;
    else if (begins(field, ".tag")) tensor->tag = number != 0 ? number : tag_of(got);
    else if (begins(rule, "must not be NULL")) tensor->data = NULL;
    else {
        EP_REQUIRE(multiple != NULL);
        tensor->data = (char*)tensor->data + strtoul(multiple + strlen("multiple of "), NULL, 10) / 2;
    }
}

// Does to valid tensors what a refusal complains of: a call with one thing wrong.
static void break_call(const Session* session, const char* text, CallTensors* tensors) {
    static const char* const kLists[] = {"inputs", "outputs", "local_tensors", "topk_idx"};
    const bool is_count = begins(text, "num_");
    const char* place = text + (is_count ? strlen("num_") : 0);
    const unsigned name = named(kLists, COUNT(kLists), place);
    EP_REQUIRE(name < COUNT(kLists));
    TensorList* list = &tensors->lists[name % kNumLists];
    const char* field = place + strlen(kLists[name]);
    const unsigned tag = *field == '[' ? tag_of(field + 1) : NCCL_EP_TENSOR_TAG_TOPK_IDX;
    if (*field == '[') field = strchr(field, ']') + 1;
    const char* rule = strstr(text, ": ") + 2;
    const char* got = strstr(rule, "(got ");
    got = got != NULL ? got + strlen("(got ") : "";
    if (is_count) list->count = (unsigned)strtoul(got, NULL, 10);
    else if (begins(rule, "must not be NULL when")) list->null = true;
    else if (*field == ':' && begins(rule, "must not be NULL")) list->items[0] = NULL;
    else if (*field == ':' && begins(rule, "is required")) remove_tensor(list, find(list, tag));
    else if (*field == ':') add_tensor(list, tag, session->weights);
    else if (strstr(rule, "is in the list already")) add_tensor(list, tag_of(rule), session->weights);
    else break_field(find(list, tag), field, rule, got);
}

// ---- What a refused call must not touch --------------------------------------------------------

enum { kMostBytes = 1 << 16 };

static void mark_outputs(const Session* session) {
    for (unsigned i = 0; i < kNumOutputs; ++i) {
        EP_REQUIRE_CUDA(cudaMemset(session->outputs[i], kUntouched, bytes_of_output(session, i)));
    }
}

static void check_outputs_untouched(const Session* session) {
    static unsigned char found[kMostBytes];
    static unsigned char expected[kMostBytes];
    memset(expected, kUntouched, sizeof(expected));
    ep_sync(session->env);
    for (unsigned i = 0; i < kNumOutputs; ++i) {
        const size_t bytes = bytes_of_output(session, i);
        EP_REQUIRE(bytes <= sizeof(found));
        ep_download(found, session->outputs[i], bytes);
        EP_CHECK_EQ_BYTES(found, expected, bytes);
    }
}

void check_broken_calls(const Session* session, CallKind kind, const BrokenCall* calls, size_t num_calls) {
    mark_outputs(session);
    for (size_t i = 0; i < num_calls; ++i) {
        const char* given = calls[i].given != NULL ? calls[i].given : "";
        char text[kMostText];
        const char* complaint = write_refusal(calls[i].id, given, text);
        CallTensors tensors;
        valid_tensors(session, kind, &tensors);
        break_call(session, calls[i].cause != NULL ? calls[i].cause : complaint, &tensors);
        EP_REFUSED_AS(calls[i].id, make_call(session, kind, &tensors, 0), "%s", given);
        check_outputs_untouched(session);
    }
}
