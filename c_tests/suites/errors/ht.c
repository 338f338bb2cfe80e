// Refusals of high-throughput dispatch and combine: the rules of each tensor, forward and backward.
// These calls are local: refusing one leaves no rank waiting.
#include "suites/errors/calls.h"

#define ARGUMENT ncclInvalidArgument

static const BrokenCall kForwardDispatch[] = {
    MISSING("dispatch-ht-in-required", kInputs, TOKENS),
    NDIM("dispatch-ht-in-ndim", kInputs, TOKENS, 3, 2),
    UNKNOWN_TYPE("dispatch-ht-in-datatype", kInputs, TOKENS),
    ROWS("dispatch-ht-in-row", "dispatch-ht-in-row-most", 1),
    SIZE("dispatch-ht-in-rows", kInputs, TOKENS, 0, 3, "must be the handle's number of tokens", "4"),
    DATA("dispatch-ht-in-data", "dispatch-ht-in-align", kInputs, TOKENS, 16),
    NDIM("dispatch-ht-out-ndim", kOutputs, TOKENS, 3, 2),
    CHANGED_ROWS("dispatch-ht-out-datatype", kOutputs, ncclFloat16, "float16", "bfloat16"),
    CHANGED_ROWS("dispatch-ht-out-datatype", kInputs, ncclFloat16, "bfloat16", "float16"),
    SIZE("dispatch-ht-out-hidden", kOutputs, TOKENS, 1, 8, "must be the hidden size of the input tokens", "16"),
    DATA("dispatch-ht-out-data", "dispatch-ht-out-align", kOutputs, TOKENS, 16),
    NDIM("dispatch-ht-in-ids-ndim", kInputs, IDS, 1, 2),
    DATATYPE("dispatch-ht-in-ids-datatype", kInputs, IDS, ncclInt32, "int32", "int64"),
    SIZE("dispatch-ht-in-ids-columns", kInputs, IDS, 1, 3, "must be the handle's top-k", "2"),
    SIZE("dispatch-ht-in-ids-rows", kInputs, IDS, 0, 3, "must be the handle's number of tokens", "4"),
    DATA("dispatch-ht-in-ids-data", "dispatch-ht-in-ids-align", kInputs, IDS, 8),
    MISSING("dispatch-ht-in-weights-required", kInputs, WEIGHTS),
    NDIM("dispatch-ht-in-weights-ndim", kInputs, WEIGHTS, 1, 2),
    DATATYPE("dispatch-ht-in-weights-datatype", kInputs, WEIGHTS, ncclFloat16, "float16", "float32"),
    SIZE("dispatch-ht-in-weights-columns", kInputs, WEIGHTS, 1, 3, "must be the handle's top-k", "2"),
    SIZE("dispatch-ht-in-weights-rows", kInputs, WEIGHTS, 0, 3, "must be the handle's number of tokens", "4"),
    DATA("dispatch-ht-in-weights-data", "dispatch-ht-in-weights-align", kInputs, WEIGHTS, 4),
    MISSING("dispatch-ht-out-ids-required", kOutputs, IDS),
    NDIM("dispatch-ht-out-ids-ndim", kOutputs, IDS, 1, 2),
    DATATYPE("dispatch-ht-out-ids-datatype", kOutputs, IDS, ncclInt32, "int32", "int64"),
    SIZE("dispatch-ht-out-ids-columns", kOutputs, IDS, 1, 3, "must be the handle's top-k", "2"),
    DATA("dispatch-ht-out-ids-data", "dispatch-ht-out-ids-align", kOutputs, IDS, 8),
    MISSING("dispatch-ht-out-weights-required", kOutputs, WEIGHTS),
    NDIM("dispatch-ht-out-weights-ndim", kOutputs, WEIGHTS, 1, 2),
    DATATYPE("dispatch-ht-out-weights-datatype", kOutputs, WEIGHTS, ncclFloat16, "float16", "float32"),
    SIZE("dispatch-ht-out-weights-columns", kOutputs, WEIGHTS, 1, 3, "must be the handle's top-k", "2"),
    SIZE("dispatch-ht-out-weights-rows", kOutputs, WEIGHTS, 0, 1, "must be the rows of outputs[TOPK_IDX]", "*"),
    DATA("dispatch-ht-out-weights-data", "dispatch-ht-out-weights-align", kOutputs, WEIGHTS, 4),
    NDIM("dispatch-ht-counter-ndim", kLocals, COUNTER, 2, 1),
    DATATYPE("dispatch-ht-counter-datatype", kLocals, COUNTER, ncclInt64, "int64", "int32"),
    SIZE("dispatch-ht-counter-size", kLocals, COUNTER, 0, 1, "must be at least the number of local experts",
         "2 or more"),
    DATA("dispatch-ht-counter-data", "dispatch-ht-counter-align", kLocals, COUNTER, 4),
};

static const BrokenCall kTokensOnlyDispatch[] = {
    {"dispatch-ht-only-in-weights", ARGUMENT, kInputs, WEIGHTS, kAdd, 0,
     "inputs[TOPK_WEIGHTS]: needs inputs[TOPK_IDX]: a tokens-only dispatch has no weights"},
    {"dispatch-ht-only-out-ids", ARGUMENT, kOutputs, IDS, kAdd, 0,
     "outputs[TOPK_IDX]: needs inputs[TOPK_IDX] and inputs[TOPK_WEIGHTS]: a tokens-only dispatch has none"},
    {"dispatch-ht-only-out-weights", ARGUMENT, kOutputs, WEIGHTS, kAdd, 0,
     "outputs[TOPK_WEIGHTS]: needs inputs[TOPK_IDX] and inputs[TOPK_WEIGHTS]: a tokens-only dispatch has none"},
};

static const BrokenCall kForwardCombine[] = {
    MISSING("combine-ht-in-required", kInputs, TOKENS),
    NDIM("combine-ht-in-ndim", kInputs, TOKENS, 3, 2),
    UNKNOWN_TYPE("combine-ht-in-datatype", kInputs, TOKENS),
    NOT_SUMMED("combine-ht-in-sum", ncclInt32, "int32"),
    NOT_SUMMED("combine-ht-in-sum", 10, "float8e4m3"),
    ROWS("combine-ht-in-row", "combine-ht-in-row-most", 1),
    DATA("combine-ht-in-data", "combine-ht-in-align", kInputs, TOKENS, 16),
    NO_SUMMED_SCALES("combine-ht-in-scales", kInputs),
    NO_SUMMED_SCALES("combine-ht-out-scales", kOutputs),
    MISSING("combine-ht-out-required", kOutputs, TOKENS),
    NDIM("combine-ht-out-ndim", kOutputs, TOKENS, 3, 2),
    SIZE("combine-ht-out-rows", kOutputs, TOKENS, 0, 5, "must be the handle's number of tokens", "4"),
    DATATYPE("combine-ht-out-datatype", kOutputs, TOKENS, ncclFloat16, "float16", "bfloat16"),
    SIZE("combine-ht-out-hidden", kOutputs, TOKENS, 1, 8, "must be the hidden size of the input tokens", "16"),
    DATA("combine-ht-out-data", "combine-ht-out-align", kOutputs, TOKENS, 16),
};

static const BrokenCall kBackwardCombine[] = {
    NDIM("combine-ht-in-weights-ndim", kInputs, WEIGHTS, 1, 2),
    DATATYPE("combine-ht-in-weights-datatype", kInputs, WEIGHTS, ncclFloat16, "float16", "float32"),
    SIZE("combine-ht-in-weights-rows", kInputs, WEIGHTS, 0, 1, "must be the rows of inputs[TOKENS]", "*"),
    SIZE("combine-ht-in-weights-columns", kInputs, WEIGHTS, 1, 33, "must be at most the largest top-k", "32 or less"),
    DATA("combine-ht-in-weights-data", "combine-ht-in-weights-align", kInputs, WEIGHTS, 4),
    MISSING("combine-ht-out-weights-required", kOutputs, WEIGHTS),
    NDIM("combine-ht-out-weights-ndim", kOutputs, WEIGHTS, 1, 2),
    DATATYPE("combine-ht-out-weights-datatype", kOutputs, WEIGHTS, ncclFloat16, "float16", "float32"),
    SIZE("combine-ht-out-weights-rows", kOutputs, WEIGHTS, 0, 5, "must be the handle's number of tokens", "4"),
    SIZE("combine-ht-out-weights-columns", kOutputs, WEIGHTS, 1, 3, "must be the columns of inputs[TOPK_WEIGHTS]", "2"),
    DATA("combine-ht-out-weights-data", "combine-ht-out-weights-align", kOutputs, WEIGHTS, 4),
};

HT_SESSION_TEST(ht_dispatch_arguments) {
    check_broken_calls(session, kDispatch, kForwardDispatch, COUNT(kForwardDispatch));
    check_broken_calls(session, kTokensOnly, kTokensOnlyDispatch, COUNT(kTokensOnlyDispatch));
}

HT_SESSION_TEST(ht_combine_arguments) {
    check_works(session);
    check_broken_calls(session, kCombine, kForwardCombine, COUNT(kForwardCombine));
    check_broken_calls(session, kBackward, kBackwardCombine, COUNT(kBackwardCombine));
}
