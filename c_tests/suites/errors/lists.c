// Refusals of ncclEpDispatch and ncclEpCombine that concern a list of tensors, or a descriptor
// before its meaning is known. They are the same for every list and both modes.
#include "suites/errors/errors.h"

// What is wrong with a list, or with its tensor of a tag: the ids of both functions, and what is given of their rows.
static const struct {
    const char *dispatch, *combine, *given;
} kRules[] = {
    {"dispatch-list-null", "combine-list-null", "{%s}"},
    {"dispatch-list-item", "combine-list-item", "{%s}{0}"},
    // Far beyond the list: nothing of it may be read.
    {"dispatch-list-count", "combine-list-count", "{%s} got 17, expected at most 16"},
    {"dispatch-list-count", "combine-list-count", "{%s} got 100000, expected at most 16"},
    {"dispatch-list-count", "combine-list-count", "{%s} got 4294967295, expected at most 16"},
    // Behind the valid ones.
    {"dispatch-list-again", "combine-list-again", "{%s}{*}{%s}"},
    {"dispatch-tensor-dims", "combine-tensor-dims", "{%s}{%s} got 0, expected 1 to 5"},
    {"dispatch-tensor-dims", "combine-tensor-dims", "{%s}{%s} got 6, expected 1 to 5"},
    {"dispatch-tensor-sizes", "combine-tensor-sizes", "{%s}{%s}"},
    {"dispatch-tensor-strides", "combine-tensor-strides",
     "{%s}{%s} got [3*], expected all ones, NULL, or row-major strides"},
};

static void check_list(const Session* session, CallKind kind, const char* list, const char* tag) {
    for (size_t i = 0; i < COUNT(kRules); ++i) {
        char given[256];
        snprintf(given, sizeof(given), kRules[i].given, list, tag);
        const BrokenCall broken = {kind == kDispatch ? kRules[i].dispatch : kRules[i].combine, given};
        check_broken_calls(session, kind, &broken, 1);
    }
}

EP_TEST_EACH(lists_of_tensors) {
    Session session = open_session(env, algorithm);
    check_works(&session);
    check_list(&session, kDispatch, "inputs", "TOKENS");
    check_list(&session, kDispatch, "outputs", "TOKENS");
    check_list(&session, kDispatch, "local_tensors", "RECV_EXPERT_COUNTER_DEVICE");
    check_list(&session, kCombine, "inputs", "TOKENS");
    check_list(&session, kCombine, "outputs", "TOKENS");
    if (algorithm == NCCL_EP_ALGO_LOW_LATENCY) check_list(&session, kCombine, "local_tensors", "TOPK_WEIGHTS");
    finish_session(&session);
}
