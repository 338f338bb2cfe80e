// Refusals of low-latency dispatch and combine: the rules of each tensor, and the order of calls.
#include "suites/errors/errors.h"

#define ARGUMENT ncclInvalidArgument
#define USAGE ncclInvalidUsage
#define TOKENS NCCL_EP_TENSOR_TAG_TOKENS
#define WEIGHTS NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS
#define SCALES NCCL_EP_TENSOR_TAG_SCALES
#define COUNTER NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE
#define DIMS "must be the number of dimensions that this tensor has in this call "
#define TYPES "must be an element type that this tensor may have "
#define ALIGNED "must be aligned for its elements (got 0x*, expected a multiple of "
#define NOT_NULL "must not be NULL unless the tensor is empty"

// ---- Dispatch ----------------------------------------------------------------------------------
static const BrokenCall kDispatchCalls[] = {
    {"dispatch-ll-in-required", ARGUMENT, kInputs, TOKENS, kRemove, 0,
     "inputs[TOKENS]: is required"},
    {"dispatch-ll-in-ndim", ARGUMENT, kInputs, TOKENS, kNdim, 3,
     "inputs[TOKENS].ndim: " DIMS "(got 3, expected 2)"},
    {"dispatch-ll-in-datatype", ARGUMENT, kInputs, TOKENS, kDatatype, ncclInt32,
     "inputs[TOKENS].datatype: " TYPES "(got int32, expected bfloat16, float16 or float32)"},
    {"dispatch-ll-in-datatype", ARGUMENT, kInputs, TOKENS, kDatatype, 77,
     "inputs[TOKENS].datatype: " TYPES "(got an unknown number, expected bfloat16, float16 or "
     "float32)"},
    {"dispatch-ll-in-fp8", USAGE, kInputs, TOKENS, kDatatype, 10,
     "inputs[TOKENS].datatype: FP8 tokens are not supported yet (got float8e4m3, expected "
     "bfloat16, float16 or float32)"},
    {"dispatch-ll-in-row", ARGUMENT, kInputs, TOKENS, kSize1, 0,
     "inputs[TOKENS].sizes[1]: a row must be a positive multiple of 16 bytes (got 0 bytes, "
     "expected a multiple of 16 bytes)"},
    {"dispatch-ll-in-row", ARGUMENT, kInputs, TOKENS, kSize1, 12,
     "inputs[TOKENS].sizes[1]: a row must be a positive multiple of 16 bytes (got 24 bytes, "
     "expected a multiple of 16 bytes)"},
    {"dispatch-ll-in-row-most", ARGUMENT, kInputs, TOKENS, kSize1, 40,
     "inputs[TOKENS].sizes[1]: a row must not exceed the group's token_size_bytes (got 80 bytes, "
     "expected at most 64 bytes)"},
    {"dispatch-ll-in-rows", ARGUMENT, kInputs, TOKENS, kSize0, 3,
     "inputs[TOKENS].sizes[0]: must be the handle's number of tokens (got 3, expected 4)"},
    {"dispatch-ll-in-data", ARGUMENT, kInputs, TOKENS, kNullData, 0,
     "inputs[TOKENS].data: " NOT_NULL},
    {"dispatch-ll-in-align", ARGUMENT, kInputs, TOKENS, kShiftData, 8,
     "inputs[TOKENS].data: " ALIGNED "16)"},
    {"dispatch-ll-in-scales", USAGE, kInputs, SCALES, kAdd, 0,
     "inputs[SCALES]: FP8 tokens with scales are not supported yet"},
    {"dispatch-ll-out-scales", USAGE, kOutputs, SCALES, kAdd, 0,
     "outputs[SCALES]: FP8 tokens with scales are not supported yet"},
    {"dispatch-ll-out-required", ARGUMENT, kOutputs, TOKENS, kRemove, 0,
     "outputs[TOKENS]: is required"},
    {"dispatch-ll-out-ndim", ARGUMENT, kOutputs, TOKENS, kNdim, 2,
     "outputs[TOKENS].ndim: " DIMS "(got 2, expected 3)"},
    {"dispatch-ll-out-experts", ARGUMENT, kOutputs, TOKENS, kSize0, 3,
     "outputs[TOKENS].sizes[0]: must be the number of local experts (got 3, expected 2)"},
    {"dispatch-ll-out-slots", ARGUMENT, kOutputs, TOKENS, kSize1, 1,
     "outputs[TOKENS].sizes[1]: must be ranks times max_tokens_per_rank (got 1, expected *)"},
    {"dispatch-ll-out-datatype", ARGUMENT, kOutputs, TOKENS, kDatatype, ncclFloat16,
     "outputs[TOKENS].datatype: " TYPES "(got float16, expected bfloat16)"},
    {"dispatch-ll-out-hidden", ARGUMENT, kOutputs, TOKENS, kSize2, 8,
     "outputs[TOKENS].sizes[2]: must be the hidden size of the input tokens (got 8, expected 16)"},
    {"dispatch-ll-out-data", ARGUMENT, kOutputs, TOKENS, kNullData, 0,
     "outputs[TOKENS].data: " NOT_NULL},
    {"dispatch-ll-out-align", ARGUMENT, kOutputs, TOKENS, kShiftData, 8,
     "outputs[TOKENS].data: " ALIGNED "16)"},
    {"dispatch-ll-counter-ndim", ARGUMENT, kLocals, COUNTER, kNdim, 2,
     "local_tensors[RECV_EXPERT_COUNTER_DEVICE].ndim: " DIMS "(got 2, expected 1)"},
    {"dispatch-ll-counter-datatype", ARGUMENT, kLocals, COUNTER, kDatatype, ncclInt64,
     "local_tensors[RECV_EXPERT_COUNTER_DEVICE].datatype: " TYPES "(got int64, expected int32)"},
    {"dispatch-ll-counter-size", ARGUMENT, kLocals, COUNTER, kSize0, 3,
     "local_tensors[RECV_EXPERT_COUNTER_DEVICE].sizes[0]: must be the number of local experts "
     "(got 3, expected 2)"},
    {"dispatch-ll-counter-data", ARGUMENT, kLocals, COUNTER, kNullData, 0,
     "local_tensors[RECV_EXPERT_COUNTER_DEVICE].data: " NOT_NULL},
    {"dispatch-ll-counter-align", ARGUMENT, kLocals, COUNTER, kShiftData, 2,
     "local_tensors[RECV_EXPERT_COUNTER_DEVICE].data: " ALIGNED "4)"},
};

// ---- Combine -----------------------------------------------------------------------------------

static const BrokenCall kCombineCalls[] = {
    {"combine-ll-in-required", ARGUMENT, kInputs, TOKENS, kRemove, 0,
     "inputs[TOKENS]: is required"},
    {"combine-ll-in-ndim", ARGUMENT, kInputs, TOKENS, kNdim, 2,
     "inputs[TOKENS].ndim: " DIMS "(got 2, expected 3)"},
    {"combine-ll-in-experts", ARGUMENT, kInputs, TOKENS, kSize0, 3,
     "inputs[TOKENS].sizes[0]: must be the number of local experts (got 3, expected 2)"},
    {"combine-ll-in-slots", ARGUMENT, kInputs, TOKENS, kSize1, 1,
     "inputs[TOKENS].sizes[1]: must be ranks times max_tokens_per_rank (got 1, expected *)"},
    {"combine-ll-in-datatype", ARGUMENT, kInputs, TOKENS, kDatatype, ncclInt32,
     "inputs[TOKENS].datatype: " TYPES "(got int32, expected bfloat16, float16 or float32)"},
    {"combine-ll-in-datatype", ARGUMENT, kInputs, TOKENS, kDatatype, 77,
     "inputs[TOKENS].datatype: " TYPES "(got an unknown number, expected bfloat16, float16 or "
     "float32)"},
    {"combine-ll-in-fp8", USAGE, kInputs, TOKENS, kDatatype, 10,
     "inputs[TOKENS].datatype: FP8 tokens are not supported yet (got float8e4m3, expected "
     "bfloat16, float16 or float32)"},
    {"combine-ll-in-row", ARGUMENT, kInputs, TOKENS, kSize2, 0,
     "inputs[TOKENS].sizes[2]: a row must be a positive multiple of 16 bytes (got 0 bytes, "
     "expected a multiple of 16 bytes)"},
    {"combine-ll-in-row", ARGUMENT, kInputs, TOKENS, kSize2, 12,
     "inputs[TOKENS].sizes[2]: a row must be a positive multiple of 16 bytes (got 24 bytes, "
     "expected a multiple of 16 bytes)"},
    {"combine-ll-in-row-most", ARGUMENT, kInputs, TOKENS, kSize2, 40,
     "inputs[TOKENS].sizes[2]: a row must not exceed the group's token_size_bytes (got 80 bytes, "
     "expected at most 64 bytes)"},
    {"combine-ll-in-data", ARGUMENT, kInputs, TOKENS, kNullData, 0,
     "inputs[TOKENS].data: " NOT_NULL},
    {"combine-ll-in-align", ARGUMENT, kInputs, TOKENS, kShiftData, 8,
     "inputs[TOKENS].data: " ALIGNED "16)"},
    {"combine-ll-in-scales", USAGE, kInputs, SCALES, kAdd, 0,
     "inputs[SCALES]: FP8 tokens with scales are not supported yet"},
    {"combine-ll-weights-required", ARGUMENT, kLocals, WEIGHTS, kRemove, 0,
     "local_tensors[TOPK_WEIGHTS]: is required"},
    {"combine-ll-weights-ndim", ARGUMENT, kLocals, WEIGHTS, kNdim, 1,
     "local_tensors[TOPK_WEIGHTS].ndim: " DIMS "(got 1, expected 2)"},
    {"combine-ll-weights-datatype", ARGUMENT, kLocals, WEIGHTS, kDatatype, ncclFloat64,
     "local_tensors[TOPK_WEIGHTS].datatype: " TYPES "(got float64, expected float32)"},
    {"combine-ll-weights-rows", ARGUMENT, kLocals, WEIGHTS, kSize0, 5,
     "local_tensors[TOPK_WEIGHTS].sizes[0]: must be the handle's number of tokens (got 5, "
     "expected 4)"},
    {"combine-ll-weights-columns", ARGUMENT, kLocals, WEIGHTS, kSize1, 3,
     "local_tensors[TOPK_WEIGHTS].sizes[1]: must be the handle's top-k (got 3, expected 2)"},
    {"combine-ll-weights-data", ARGUMENT, kLocals, WEIGHTS, kNullData, 0,
     "local_tensors[TOPK_WEIGHTS].data: " NOT_NULL},
    {"combine-ll-weights-align", ARGUMENT, kLocals, WEIGHTS, kShiftData, 2,
     "local_tensors[TOPK_WEIGHTS].data: " ALIGNED "4)"},
    {"combine-ll-out-required", ARGUMENT, kOutputs, TOKENS, kRemove, 0,
     "outputs[TOKENS]: is required"},
    {"combine-ll-out-ndim", ARGUMENT, kOutputs, TOKENS, kNdim, 3,
     "outputs[TOKENS].ndim: " DIMS "(got 3, expected 2)"},
    {"combine-ll-out-rows", ARGUMENT, kOutputs, TOKENS, kSize0, 5,
     "outputs[TOKENS].sizes[0]: must be the handle's number of tokens (got 5, expected 4)"},
    {"combine-ll-out-datatype", ARGUMENT, kOutputs, TOKENS, kDatatype, ncclFloat16,
     "outputs[TOKENS].datatype: " TYPES "(got float16, expected bfloat16)"},
    {"combine-ll-out-hidden", ARGUMENT, kOutputs, TOKENS, kSize1, 8,
     "outputs[TOKENS].sizes[1]: must be the hidden size of the input tokens (got 8, expected 16)"},
    {"combine-ll-out-data", ARGUMENT, kOutputs, TOKENS, kNullData, 0,
     "outputs[TOKENS].data: " NOT_NULL},
    {"combine-ll-out-align", ARGUMENT, kOutputs, TOKENS, kShiftData, 8,
     "outputs[TOKENS].data: " ALIGNED "16)"},
};

void ll_dispatch_arguments(EpEnv* env) {
    Session session;
    open_session(&session, env, NCCL_EP_ALGO_LOW_LATENCY);
    check_broken_calls(&session, kDispatch, kDispatchCalls, COUNT(kDispatchCalls));
    check_works(&session);
    close_session(&session);
}

void ll_combine_arguments(EpEnv* env) {
    Session session;
    open_session(&session, env, NCCL_EP_ALGO_LOW_LATENCY);
    check_works(&session);
    check_broken_calls(&session, kCombine, kCombineCalls, COUNT(kCombineCalls));
    check_works(&session);
    close_session(&session);
}

// ---- The order of calls ------------------------------------------------------------------------

// Three handles of one group, of which at most two may have an operation in flight.
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

void ll_order_of_calls(EpEnv* env) {
    Session session;
    open_session(&session, env, NCCL_EP_ALGO_LOW_LATENCY);
    EP_REFUSED("combine-ll-before-dispatch", make_valid_call(&session, kCombine, 0), USAGE,
               "ncclEpCombine: handle: needs a dispatch before its first combine");
    EP_CHECK_NCCL(ncclEpComplete(session.handle, NULL, env->stream));
    EP_CHECK_NCCL(make_valid_call(&session, kDispatch, 1));
    EP_REFUSED("dispatch-ll-staged", make_valid_call(&session, kDispatch, 0), USAGE,
               "ncclEpDispatch: handle: its staged operation waits for ncclEpComplete");
    EP_REFUSED("combine-ll-staged", make_valid_call(&session, kCombine, 0), USAGE,
               "ncclEpCombine: handle: its staged operation waits for ncclEpComplete");
    EP_CHECK_NCCL(ncclEpComplete(session.handle, NULL, env->stream));
    check_works(&session);
    too_many_staged(&session);
    check_works(&session);
    close_session(&session);
}
