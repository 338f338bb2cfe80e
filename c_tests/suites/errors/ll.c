// Refusals of low-latency dispatch and combine: the rules of each tensor, and the order of calls.
#include "suites/errors/calls.h"

#define USAGE ncclInvalidUsage

// ---- Dispatch ----------------------------------------------------------------------------------
static const BrokenCall kDispatchCalls[] = {
    MISSING("dispatch-ll-in-required", kInputs, TOKENS),
    NDIM("dispatch-ll-in-ndim", kInputs, TOKENS, 3, 2),
    UNKNOWN_TYPE("dispatch-ll-in-datatype", kInputs, TOKENS),
    ROWS("dispatch-ll-in-row", "dispatch-ll-in-row-most", 1),
    SIZE("dispatch-ll-in-rows", kInputs, TOKENS, 0, 3, "must be the handle's number of tokens", "4"),
    DATA("dispatch-ll-in-data", "dispatch-ll-in-align", kInputs, TOKENS, 16),
    MISSING("dispatch-ll-out-required", kOutputs, TOKENS),
    NDIM("dispatch-ll-out-ndim", kOutputs, TOKENS, 2, 3),
    SIZE("dispatch-ll-out-experts", kOutputs, TOKENS, 0, 3, "must be the number of local experts", "2"),
    SIZE("dispatch-ll-out-slots", kOutputs, TOKENS, 1, 1, "must be ranks times max_tokens_per_rank", "*"),
    CHANGED_ROWS("dispatch-ll-out-datatype", kOutputs, ncclFloat16, "float16", "bfloat16"),
    CHANGED_ROWS("dispatch-ll-out-datatype", kInputs, ncclFloat16, "bfloat16", "float16"),
    SIZE("dispatch-ll-out-hidden", kOutputs, TOKENS, 2, 8, "must be the hidden size of the input tokens", "16"),
    DATA("dispatch-ll-out-data", "dispatch-ll-out-align", kOutputs, TOKENS, 16),
    NDIM("dispatch-ll-counter-ndim", kLocals, COUNTER, 2, 1),
    DATATYPE("dispatch-ll-counter-datatype", kLocals, COUNTER, ncclInt64, "int64", "int32"),
    SIZE("dispatch-ll-counter-size", kLocals, COUNTER, 0, 3, "must be the number of local experts", "2"),
    DATA("dispatch-ll-counter-data", "dispatch-ll-counter-align", kLocals, COUNTER, 4),
};

// ---- Combine -----------------------------------------------------------------------------------

static const BrokenCall kCombineCalls[] = {
    MISSING("combine-ll-in-required", kInputs, TOKENS),
    NDIM("combine-ll-in-ndim", kInputs, TOKENS, 2, 3),
    SIZE("combine-ll-in-experts", kInputs, TOKENS, 0, 3, "must be the number of local experts", "2"),
    SIZE("combine-ll-in-slots", kInputs, TOKENS, 1, 1, "must be ranks times max_tokens_per_rank", "*"),
    UNKNOWN_TYPE("combine-ll-in-datatype", kInputs, TOKENS),
    NOT_SUMMED("combine-ll-in-sum", ncclInt32, "int32"),
    NOT_SUMMED("combine-ll-in-sum", 10, "float8e4m3"),
    ROWS("combine-ll-in-row", "combine-ll-in-row-most", 2),
    DATA("combine-ll-in-data", "combine-ll-in-align", kInputs, TOKENS, 16),
    NO_SUMMED_SCALES("combine-ll-in-scales", kInputs),
    NO_SUMMED_SCALES("combine-ll-out-scales", kOutputs),
    MISSING("combine-ll-weights-required", kLocals, WEIGHTS),
    NDIM("combine-ll-weights-ndim", kLocals, WEIGHTS, 1, 2),
    DATATYPE("combine-ll-weights-datatype", kLocals, WEIGHTS, ncclFloat64, "float64", "float32"),
    SIZE("combine-ll-weights-rows", kLocals, WEIGHTS, 0, 5, "must be the handle's number of tokens", "4"),
    SIZE("combine-ll-weights-columns", kLocals, WEIGHTS, 1, 3, "must be the handle's top-k", "2"),
    DATA("combine-ll-weights-data", "combine-ll-weights-align", kLocals, WEIGHTS, 4),
    MISSING("combine-ll-out-required", kOutputs, TOKENS),
    NDIM("combine-ll-out-ndim", kOutputs, TOKENS, 3, 2),
    SIZE("combine-ll-out-rows", kOutputs, TOKENS, 0, 5, "must be the handle's number of tokens", "4"),
    DATATYPE("combine-ll-out-datatype", kOutputs, TOKENS, ncclFloat16, "float16", "bfloat16"),
    SIZE("combine-ll-out-hidden", kOutputs, TOKENS, 1, 8, "must be the hidden size of the input tokens", "16"),
    DATA("combine-ll-out-data", "combine-ll-out-align", kOutputs, TOKENS, 16),
};

LL_SESSION_TEST(ll_dispatch_arguments) {
    check_broken_calls(session, kDispatch, kDispatchCalls, COUNT(kDispatchCalls));
}

LL_SESSION_TEST(ll_combine_arguments) {
    check_works(session);
    check_broken_calls(session, kCombine, kCombineCalls, COUNT(kCombineCalls));
}

// ---- The order of calls ------------------------------------------------------------------------

// Also after a dispatch that was refused.
static void check_dispatch_comes_first(const Session* session) {
    EP_REFUSED("combine-ll-before-dispatch", make_valid_call(session, kCombine, 0), USAGE,
               "ncclEpCombine: handle: needs a dispatch before its first combine");
}

// Three handles of one group, of which two may have a staged operation in flight.
static void too_many_staged(Session* first) {
    Session second = *first;
    Session third = *first;
    const EpEnv* env = first->env;
    EP_REQUIRE_NCCL(open_handle(&second));
    EP_REQUIRE_NCCL(open_handle(&third));
    EP_CHECK_NCCL(make_valid_call(first, kDispatch, 1));
    EP_CHECK_NCCL(make_valid_call(&second, kDispatch, 1));
    EP_REFUSED("dispatch-staged-most", make_valid_call(&third, kDispatch, 1), USAGE,
               "ncclEpDispatch: send_only: too many staged operations of the group wait for "
               "ncclEpComplete (got 3, expected at most 2)");
    check_dispatch_comes_first(&third);
    EP_CHECK_NCCL(ncclEpComplete(first->handle, NULL, env->stream));
    EP_CHECK_NCCL(make_valid_call(first, kCombine, 1));
    EP_CHECK_NCCL(make_valid_call(&third, kDispatch, 0));
    EP_REFUSED("combine-staged-most", make_valid_call(&third, kCombine, 1), USAGE,
               "ncclEpCombine: send_only: too many staged operations of the group wait for "
               "ncclEpComplete (got 3, expected at most 2)");
    EP_CHECK_NCCL(ncclEpComplete(first->handle, NULL, env->stream));
    EP_CHECK_NCCL(ncclEpComplete(second.handle, NULL, env->stream));
    EP_CHECK_NCCL(make_valid_call(&third, kCombine, 0));
    ep_sync(env);
    EP_CHECK_NCCL(ncclEpHandleDestroy(third.handle));
    EP_CHECK_NCCL(ncclEpHandleDestroy(second.handle));
}

LL_SESSION_TEST(ll_order_of_calls) {
    check_dispatch_comes_first(session);
    CallTensors empty;
    memset(&empty, 0, sizeof(empty));
    EP_CHECK_RESULT(make_call(session, kDispatch, &empty, 0), ncclInvalidArgument);
    check_dispatch_comes_first(session);
    EP_CHECK_NCCL(ncclEpComplete(session->handle, NULL, env->stream));
    EP_CHECK_NCCL(make_valid_call(session, kDispatch, 1));
    EP_REFUSED("dispatch-ll-staged", make_valid_call(session, kDispatch, 0), USAGE,
               "ncclEpDispatch: handle: its staged operation waits for ncclEpComplete");
    EP_REFUSED("combine-ll-staged", make_valid_call(session, kCombine, 0), USAGE,
               "ncclEpCombine: handle: its staged operation waits for ncclEpComplete");
    EP_CHECK_NCCL(ncclEpComplete(session->handle, NULL, env->stream));
    check_works(session);
    too_many_staged(session);
}
