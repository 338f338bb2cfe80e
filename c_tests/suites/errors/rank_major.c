// Refusals of rank-major low-latency operations: what differs from expert-major ones.
#include "suites/errors/calls.h"

#define RANKS "must be the number of ranks"
#define SLOTS "must be the group's max_tokens_per_rank"

static const BrokenCall kDispatchCalls[] = {
    MISSING("dispatch-rank-out-required", kOutputs, TOKENS),
    NDIM("dispatch-rank-out-ndim", kOutputs, TOKENS, 2, 3),
    SIZE("dispatch-rank-out-ranks", kOutputs, TOKENS, 0, 99, RANKS, "*"),
    SIZE("dispatch-rank-out-slots", kOutputs, TOKENS, 1, 5, SLOTS, "6"),
    NDIM("dispatch-rank-ids-ndim", kOutputs, IDS, 2, 3),
    SIZE("dispatch-rank-ids-ranks", kOutputs, IDS, 0, 99, RANKS, "*"),
    SIZE("dispatch-rank-ids-slots", kOutputs, IDS, 1, 5, SLOTS, "6"),
    SIZE("dispatch-rank-ids-columns", kOutputs, IDS, 2, 3, "must be the handle's top-k", "2"),
    DATATYPE("dispatch-rank-ids-datatype", kOutputs, IDS, ncclInt32, "int32", "int64"),
    DATA("dispatch-rank-ids-data", "dispatch-rank-ids-align", kOutputs, IDS, 8),
    MISSING("dispatch-rank-in-weights-required", kInputs, WEIGHTS),
    NDIM("dispatch-rank-in-weights-ndim", kInputs, WEIGHTS, 1, 2),
    DATATYPE("dispatch-rank-in-weights-datatype", kInputs, WEIGHTS, ncclFloat16, "float16", "float32"),
    SIZE("dispatch-rank-in-weights-rows", kInputs, WEIGHTS, 0, 5, "must be the handle's number of tokens", "4"),
    SIZE("dispatch-rank-in-weights-columns", kInputs, WEIGHTS, 1, 3, "must be the handle's top-k", "2"),
    DATA("dispatch-rank-in-weights-data", "dispatch-rank-in-weights-align", kInputs, WEIGHTS, 4),
    MISSING("dispatch-rank-weights-required", kOutputs, WEIGHTS),
    NDIM("dispatch-rank-weights-ndim", kOutputs, WEIGHTS, 2, 3),
    SIZE("dispatch-rank-weights-ranks", kOutputs, WEIGHTS, 0, 99, RANKS, "*"),
    SIZE("dispatch-rank-weights-slots", kOutputs, WEIGHTS, 1, 5, SLOTS, "6"),
    SIZE("dispatch-rank-weights-columns", kOutputs, WEIGHTS, 2, 3, "must be the handle's top-k", "2"),
    DATATYPE("dispatch-rank-weights-datatype", kOutputs, WEIGHTS, ncclFloat16, "float16", "float32"),
    DATA("dispatch-rank-weights-data", "dispatch-rank-weights-align", kOutputs, WEIGHTS, 4),
    SIZE("dispatch-rank-counter-size", kLocals, COUNTER, 0, 99, RANKS, "*"),
};

static const BrokenCall kForwardCalls[] = {
    SIZE("dispatch-rank-out-scales-ranks", kOutputs, SCALES, 0, 99, RANKS, "*"),
    SIZE("dispatch-rank-out-scales-slots", kOutputs, SCALES, 1, 5, SLOTS, "6"),
};

static const BrokenCall kCombineCalls[] = {
    NDIM("combine-rank-in-ndim", kInputs, TOKENS, 2, 3),
    SIZE("combine-rank-in-ranks", kInputs, TOKENS, 0, 99, RANKS, "*"),
    SIZE("combine-rank-in-slots", kInputs, TOKENS, 1, 5, SLOTS, "6"),
    BROKEN("combine-rank-weights", kLocals, WEIGHTS, kAdd, 0,
           "local_tensors[TOPK_WEIGHTS]: the caller applies the weights before a combine of rank-major rows"),
    BROKEN("combine-rank-in-weights", kInputs, WEIGHTS, kAdd, 0,
           "inputs[TOPK_WEIGHTS]: the caller applies the weights before a combine of rank-major rows"),
};

LL_SESSION_TEST(rank_major_arguments) {
    check_broken_calls(session, kRankMajor, kDispatchCalls, COUNT(kDispatchCalls));
    check_broken_calls(session, kRankMajorForward, kForwardCalls, COUNT(kForwardCalls));
    EP_CHECK_NCCL(make_valid_call(session, kRankMajorForward, 0));
    EP_CHECK_NCCL(make_valid_call(session, kRankMajor, 0));
    check_broken_calls(session, kSummed, kCombineCalls, COUNT(kCombineCalls));
    EP_CHECK_NCCL(make_valid_call(session, kSummed, 0));
}

// One rank's rows are rank-major where those of the others are not.
EP_TEST(rank_major_on_one_rank) {
    // Without the stars the words would be taken for the ids of refusals.
    static const OtherCall kCall = {
        NCCL_EP_ALGO_LOW_LATENCY,   kDispatch,       kRankMajor,   NULL, "running-ll-layout",
        "layout: must be the same", "*expert-major", "*rank-major"};
    if (enough_ranks(env, 2, "running-ll-layout")) check_other_call(env, &kCall);
}
