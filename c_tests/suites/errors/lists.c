// Refusals of ncclEpDispatch and ncclEpCombine that concern a list of tensors, or a descriptor
// before its meaning is known. They are the same for every list and both modes.
#include <limits.h>

#include "suites/errors/errors.h"

// Ids of the rules for one function.
typedef struct {
    const char* null_list;
    const char* null_item;
    const char* count;
    const char* again;
    const char* dims;
    const char* sizes;
    const char* strides;
} ListRules;

static const ListRules kDispatchRules = {"dispatch-list-null",     "dispatch-list-item",   "dispatch-list-count",
                                         "dispatch-list-again",    "dispatch-tensor-dims", "dispatch-tensor-sizes",
                                         "dispatch-tensor-strides"};
static const ListRules kCombineRules = {"combine-list-null",     "combine-list-item",   "combine-list-count",
                                        "combine-list-again",    "combine-tensor-dims", "combine-tensor-sizes",
                                        "combine-tensor-strides"};

static void check_one(const Session* session, CallKind kind, BrokenCall* broken, const char* id,
                      Change change, unsigned value) {
    broken->id = id;
    broken->change = change;
    broken->value = value;
    check_broken_calls(session, kind, broken, 1);
}

// `tag` is the tag of a tensor in the list; texts call the tensor `tensor`.
static void check_list(const Session* session, CallKind kind, const ListRules* rules, ListName list,
                       unsigned tag, const char* tensor) {
    static const char* const names[] = {"inputs", "outputs", "local_tensors"};
    char text[256];
    BrokenCall broken = {NULL, ncclInvalidArgument, list, tag, kNullList, 0, text};
    const char* name = names[list];
    snprintf(text, sizeof(text), "%s: must not be NULL when its count is not 0", name);
    check_one(session, kind, &broken, rules->null_list, kNullList, 0);
    snprintf(text, sizeof(text), "%s[0]: must not be NULL", name);
    check_one(session, kind, &broken, rules->null_item, kNullItem, 0);
    // Far beyond the list: nothing of it may be read.
    static const unsigned kCounts[] = {17, 100000, UINT_MAX};
    for (size_t i = 0; i < COUNT(kCounts); ++i) {
        snprintf(text, sizeof(text), "num_%s: is more than any call takes (got %u, expected at most 16)",
                 name, kCounts[i]);
        check_one(session, kind, &broken, rules->count, kCount, kCounts[i]);
    }
    // Behind the valid ones.
    snprintf(text, sizeof(text), "%s[*].tag: %.*s is in the list already", name,
             (int)(strlen(tensor) - strlen(name) - 2), tensor + strlen(name) + 1);
    check_one(session, kind, &broken, rules->again, kAdd, 0);
    for (unsigned ndim = 0; ndim <= 6; ndim += 6) {
        snprintf(text, sizeof(text), "%s.ndim: must be a supported number of dimensions (got %u, expected 1 to 5)",
                 tensor, ndim);
        check_one(session, kind, &broken, rules->dims, kNdim, ndim);
    }
    snprintf(text, sizeof(text), "%s.sizes: must not be NULL", tensor);
    check_one(session, kind, &broken, rules->sizes, kNullSizes, 0);
    snprintf(text, sizeof(text),
             "%s.strides: must say that the tensor is dense (got [3*], expected all ones, NULL, or row-major strides)",
             tensor);
    check_one(session, kind, &broken, rules->strides, kStride0, 3);
}

static void check_lists(const EpEnv* env, ncclEpAlgorithm_t algorithm) {
    const unsigned tokens = NCCL_EP_TENSOR_TAG_TOKENS;
    Session session = open_session(env, algorithm);
    check_works(&session);
    check_list(&session, kDispatch, &kDispatchRules, kInputs, tokens, "inputs[TOKENS]");
    check_list(&session, kDispatch, &kDispatchRules, kOutputs, tokens, "outputs[TOKENS]");
    check_list(&session, kDispatch, &kDispatchRules, kLocals, NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE,
               "local_tensors[RECV_EXPERT_COUNTER_DEVICE]");
    check_list(&session, kCombine, &kCombineRules, kInputs, tokens, "inputs[TOKENS]");
    check_list(&session, kCombine, &kCombineRules, kOutputs, tokens, "outputs[TOKENS]");
    if (algorithm == NCCL_EP_ALGO_LOW_LATENCY) {
        check_list(&session, kCombine, &kCombineRules, kLocals, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS,
                   "local_tensors[TOPK_WEIGHTS]");
    }
    finish_session(&session);
}

EP_TEST(ll_lists_of_tensors) { check_lists(env, NCCL_EP_ALGO_LOW_LATENCY); }

EP_TEST_HT(ht_lists_of_tensors) { check_lists(env, NCCL_EP_ALGO_HIGH_THROUGHPUT); }
