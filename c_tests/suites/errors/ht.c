// Refusals of high-throughput dispatch and combine: the rules of each tensor, forward and backward.
// These calls are local: a refused one leaves no rank waiting.
#include "suites/errors/errors.h"

#define ARGUMENT ncclInvalidArgument
#define USAGE ncclInvalidUsage
#define TOKENS NCCL_EP_TENSOR_TAG_TOKENS
#define IDS NCCL_EP_TENSOR_TAG_TOPK_IDX
#define WEIGHTS NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS
#define SCALES NCCL_EP_TENSOR_TAG_SCALES
#define COUNTER NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE
#define DIMS "must be the number of dimensions that this tensor has in this call "
#define TYPES "must be an element type that this tensor may have "
#define ALIGNED "must be aligned for its elements (got 0x*, expected a multiple of "
#define NOT_NULL "must not be NULL unless the tensor is empty"

static const BrokenCall kForwardDispatch[] = {
    {"dispatch-ht-in-required", ARGUMENT, kInputs, TOKENS, kRemove, 0,
     "inputs[TOKENS]: is required"},
    {"dispatch-ht-in-ndim", ARGUMENT, kInputs, TOKENS, kNdim, 3,
     "inputs[TOKENS].ndim: " DIMS "(got 3, expected 2)"},
    {"dispatch-ht-in-datatype", ARGUMENT, kInputs, TOKENS, kDatatype, ncclInt32,
     "inputs[TOKENS].datatype: " TYPES "(got int32, expected bfloat16, float16 or float32)"},
    {"dispatch-ht-in-datatype", ARGUMENT, kInputs, TOKENS, kDatatype, 77,
     "inputs[TOKENS].datatype: " TYPES "(got an unknown number, expected bfloat16, float16 or "
     "float32)"},
    {"dispatch-ht-in-fp8", USAGE, kInputs, TOKENS, kDatatype, 10,
     "inputs[TOKENS].datatype: FP8 tokens are not supported yet (got float8e4m3, expected "
     "bfloat16, float16 or float32)"},
    {"dispatch-ht-in-row", ARGUMENT, kInputs, TOKENS, kSize1, 0,
     "inputs[TOKENS].sizes[1]: a row must be a positive multiple of 16 bytes (got 0 bytes, "
     "expected a multiple of 16 bytes)"},
    {"dispatch-ht-in-row", ARGUMENT, kInputs, TOKENS, kSize1, 12,
     "inputs[TOKENS].sizes[1]: a row must be a positive multiple of 16 bytes (got 24 bytes, "
     "expected a multiple of 16 bytes)"},
    {"dispatch-ht-in-row-most", ARGUMENT, kInputs, TOKENS, kSize1, 40,
     "inputs[TOKENS].sizes[1]: a row must not exceed the group's token_size_bytes (got 80 bytes, "
     "expected at most 64 bytes)"},
    {"dispatch-ht-in-rows", ARGUMENT, kInputs, TOKENS, kSize0, 3,
     "inputs[TOKENS].sizes[0]: must be the handle's number of tokens (got 3, expected 4)"},
    {"dispatch-ht-in-data", ARGUMENT, kInputs, TOKENS, kNullData, 0,
     "inputs[TOKENS].data: " NOT_NULL},
    {"dispatch-ht-in-align", ARGUMENT, kInputs, TOKENS, kShiftData, 8,
     "inputs[TOKENS].data: " ALIGNED "16)"},
    {"dispatch-ht-in-scales", USAGE, kInputs, SCALES, kAdd, 0,
     "inputs[SCALES]: FP8 tokens with scales are not supported yet"},
    {"dispatch-ht-out-scales", USAGE, kOutputs, SCALES, kAdd, 0,
     "outputs[SCALES]: FP8 tokens with scales are not supported yet"},
    {"dispatch-ht-out-ndim", ARGUMENT, kOutputs, TOKENS, kNdim, 3,
     "outputs[TOKENS].ndim: " DIMS "(got 3, expected 2)"},
    {"dispatch-ht-out-datatype", ARGUMENT, kOutputs, TOKENS, kDatatype, ncclFloat16,
     "outputs[TOKENS].datatype: " TYPES "(got float16, expected bfloat16)"},
    {"dispatch-ht-out-hidden", ARGUMENT, kOutputs, TOKENS, kSize1, 8,
     "outputs[TOKENS].sizes[1]: must be the hidden size of the input tokens (got 8, expected 16)"},
    {"dispatch-ht-out-data", ARGUMENT, kOutputs, TOKENS, kNullData, 0,
     "outputs[TOKENS].data: " NOT_NULL},
    {"dispatch-ht-out-align", ARGUMENT, kOutputs, TOKENS, kShiftData, 8,
     "outputs[TOKENS].data: " ALIGNED "16)"},
    {"dispatch-ht-in-ids-ndim", ARGUMENT, kInputs, IDS, kNdim, 1,
     "inputs[TOPK_IDX].ndim: " DIMS "(got 1, expected 2)"},
    {"dispatch-ht-in-ids-datatype", ARGUMENT, kInputs, IDS, kDatatype, ncclInt32,
     "inputs[TOPK_IDX].datatype: " TYPES "(got int32, expected int64)"},
    {"dispatch-ht-in-ids-columns", ARGUMENT, kInputs, IDS, kSize1, 3,
     "inputs[TOPK_IDX].sizes[1]: must be the handle's top-k (got 3, expected 2)"},
    {"dispatch-ht-in-ids-rows", ARGUMENT, kInputs, IDS, kSize0, 3,
     "inputs[TOPK_IDX].sizes[0]: must be the handle's number of tokens (got 3, expected 4)"},
    {"dispatch-ht-in-ids-data", ARGUMENT, kInputs, IDS, kNullData, 0,
     "inputs[TOPK_IDX].data: " NOT_NULL},
    {"dispatch-ht-in-ids-align", ARGUMENT, kInputs, IDS, kShiftData, 4,
     "inputs[TOPK_IDX].data: " ALIGNED "8)"},
    {"dispatch-ht-in-weights-required", ARGUMENT, kInputs, WEIGHTS, kRemove, 0,
     "inputs[TOPK_WEIGHTS]: is required"},
    {"dispatch-ht-in-weights-ndim", ARGUMENT, kInputs, WEIGHTS, kNdim, 1,
     "inputs[TOPK_WEIGHTS].ndim: " DIMS "(got 1, expected 2)"},
    {"dispatch-ht-in-weights-datatype", ARGUMENT, kInputs, WEIGHTS, kDatatype, ncclFloat16,
     "inputs[TOPK_WEIGHTS].datatype: " TYPES "(got float16, expected float32)"},
    {"dispatch-ht-in-weights-columns", ARGUMENT, kInputs, WEIGHTS, kSize1, 3,
     "inputs[TOPK_WEIGHTS].sizes[1]: must be the handle's top-k (got 3, expected 2)"},
    {"dispatch-ht-in-weights-rows", ARGUMENT, kInputs, WEIGHTS, kSize0, 3,
     "inputs[TOPK_WEIGHTS].sizes[0]: must be the handle's number of tokens (got 3, expected 4)"},
    {"dispatch-ht-in-weights-data", ARGUMENT, kInputs, WEIGHTS, kNullData, 0,
     "inputs[TOPK_WEIGHTS].data: " NOT_NULL},
    {"dispatch-ht-in-weights-align", ARGUMENT, kInputs, WEIGHTS, kShiftData, 2,
     "inputs[TOPK_WEIGHTS].data: " ALIGNED "4)"},
    {"dispatch-ht-out-ids-required", ARGUMENT, kOutputs, IDS, kRemove, 0,
     "outputs[TOPK_IDX]: is required"},
    {"dispatch-ht-out-ids-ndim", ARGUMENT, kOutputs, IDS, kNdim, 1,
     "outputs[TOPK_IDX].ndim: " DIMS "(got 1, expected 2)"},
    {"dispatch-ht-out-ids-datatype", ARGUMENT, kOutputs, IDS, kDatatype, ncclInt32,
     "outputs[TOPK_IDX].datatype: " TYPES "(got int32, expected int64)"},
    {"dispatch-ht-out-ids-columns", ARGUMENT, kOutputs, IDS, kSize1, 3,
     "outputs[TOPK_IDX].sizes[1]: must be the handle's top-k (got 3, expected 2)"},
    {"dispatch-ht-out-ids-data", ARGUMENT, kOutputs, IDS, kNullData, 0,
     "outputs[TOPK_IDX].data: " NOT_NULL},
    {"dispatch-ht-out-ids-align", ARGUMENT, kOutputs, IDS, kShiftData, 4,
     "outputs[TOPK_IDX].data: " ALIGNED "8)"},
    {"dispatch-ht-out-weights-required", ARGUMENT, kOutputs, WEIGHTS, kRemove, 0,
     "outputs[TOPK_WEIGHTS]: is required"},
    {"dispatch-ht-out-weights-ndim", ARGUMENT, kOutputs, WEIGHTS, kNdim, 1,
     "outputs[TOPK_WEIGHTS].ndim: " DIMS "(got 1, expected 2)"},
    {"dispatch-ht-out-weights-datatype", ARGUMENT, kOutputs, WEIGHTS, kDatatype, ncclFloat16,
     "outputs[TOPK_WEIGHTS].datatype: " TYPES "(got float16, expected float32)"},
    {"dispatch-ht-out-weights-columns", ARGUMENT, kOutputs, WEIGHTS, kSize1, 3,
     "outputs[TOPK_WEIGHTS].sizes[1]: must be the handle's top-k (got 3, expected 2)"},
    {"dispatch-ht-out-weights-rows", ARGUMENT, kOutputs, WEIGHTS, kSize0, 1,
     "outputs[TOPK_WEIGHTS].sizes[0]: must be the rows of outputs[TOPK_IDX] (got 1, expected *)"},
    {"dispatch-ht-out-weights-data", ARGUMENT, kOutputs, WEIGHTS, kNullData, 0,
     "outputs[TOPK_WEIGHTS].data: " NOT_NULL},
    {"dispatch-ht-out-weights-align", ARGUMENT, kOutputs, WEIGHTS, kShiftData, 2,
     "outputs[TOPK_WEIGHTS].data: " ALIGNED "4)"},
    {"dispatch-ht-counter-ndim", ARGUMENT, kLocals, COUNTER, kNdim, 2,
     "local_tensors[RECV_EXPERT_COUNTER_DEVICE].ndim: " DIMS "(got 2, expected 1)"},
    {"dispatch-ht-counter-datatype", ARGUMENT, kLocals, COUNTER, kDatatype, ncclInt64,
     "local_tensors[RECV_EXPERT_COUNTER_DEVICE].datatype: " TYPES "(got int64, expected int32)"},
    {"dispatch-ht-counter-size", ARGUMENT, kLocals, COUNTER, kSize0, 1,
     "local_tensors[RECV_EXPERT_COUNTER_DEVICE].sizes[0]: must be at least the number of local "
     "experts (got 1, expected 2 or more)"},
    {"dispatch-ht-counter-data", ARGUMENT, kLocals, COUNTER, kNullData, 0,
     "local_tensors[RECV_EXPERT_COUNTER_DEVICE].data: " NOT_NULL},
    {"dispatch-ht-counter-align", ARGUMENT, kLocals, COUNTER, kShiftData, 2,
     "local_tensors[RECV_EXPERT_COUNTER_DEVICE].data: " ALIGNED "4)"},
};

static const BrokenCall kTokensOnlyDispatch[] = {
    {"dispatch-ht-only-in-weights", ARGUMENT, kInputs, WEIGHTS, kAdd, 0,
     "inputs[TOPK_WEIGHTS]: needs inputs[TOPK_IDX]: a tokens-only dispatch has no weights"},
    {"dispatch-ht-only-out-ids", ARGUMENT, kOutputs, IDS, kAdd, 0,
     "outputs[TOPK_IDX]: needs inputs[TOPK_IDX] and inputs[TOPK_WEIGHTS]: a tokens-only dispatch "
     "has none"},
    {"dispatch-ht-only-out-weights", ARGUMENT, kOutputs, WEIGHTS, kAdd, 0,
     "outputs[TOPK_WEIGHTS]: needs inputs[TOPK_IDX] and inputs[TOPK_WEIGHTS]: a tokens-only "
     "dispatch has none"},
};

static const BrokenCall kForwardCombine[] = {
    {"combine-ht-in-required", ARGUMENT, kInputs, TOKENS, kRemove, 0,
     "inputs[TOKENS]: is required"},
    {"combine-ht-in-ndim", ARGUMENT, kInputs, TOKENS, kNdim, 3,
     "inputs[TOKENS].ndim: " DIMS "(got 3, expected 2)"},
    {"combine-ht-in-datatype", ARGUMENT, kInputs, TOKENS, kDatatype, ncclInt32,
     "inputs[TOKENS].datatype: " TYPES "(got int32, expected bfloat16, float16 or float32)"},
    {"combine-ht-in-datatype", ARGUMENT, kInputs, TOKENS, kDatatype, 77,
     "inputs[TOKENS].datatype: " TYPES "(got an unknown number, expected bfloat16, float16 or "
     "float32)"},
    {"combine-ht-in-fp8", USAGE, kInputs, TOKENS, kDatatype, 10,
     "inputs[TOKENS].datatype: FP8 tokens are not supported yet (got float8e4m3, expected "
     "bfloat16, float16 or float32)"},
    {"combine-ht-in-row", ARGUMENT, kInputs, TOKENS, kSize1, 0,
     "inputs[TOKENS].sizes[1]: a row must be a positive multiple of 16 bytes (got 0 bytes, "
     "expected a multiple of 16 bytes)"},
    {"combine-ht-in-row", ARGUMENT, kInputs, TOKENS, kSize1, 12,
     "inputs[TOKENS].sizes[1]: a row must be a positive multiple of 16 bytes (got 24 bytes, "
     "expected a multiple of 16 bytes)"},
    {"combine-ht-in-row-most", ARGUMENT, kInputs, TOKENS, kSize1, 40,
     "inputs[TOKENS].sizes[1]: a row must not exceed the group's token_size_bytes (got 80 bytes, "
     "expected at most 64 bytes)"},
    {"combine-ht-in-data", ARGUMENT, kInputs, TOKENS, kNullData, 0,
     "inputs[TOKENS].data: " NOT_NULL},
    {"combine-ht-in-align", ARGUMENT, kInputs, TOKENS, kShiftData, 8,
     "inputs[TOKENS].data: " ALIGNED "16)"},
    {"combine-ht-in-scales", USAGE, kInputs, SCALES, kAdd, 0,
     "inputs[SCALES]: FP8 tokens with scales are not supported yet"},
    {"combine-ht-out-required", ARGUMENT, kOutputs, TOKENS, kRemove, 0,
     "outputs[TOKENS]: is required"},
    {"combine-ht-out-ndim", ARGUMENT, kOutputs, TOKENS, kNdim, 3,
     "outputs[TOKENS].ndim: " DIMS "(got 3, expected 2)"},
    {"combine-ht-out-rows", ARGUMENT, kOutputs, TOKENS, kSize0, 5,
     "outputs[TOKENS].sizes[0]: must be the handle's number of tokens (got 5, expected 4)"},
    {"combine-ht-out-datatype", ARGUMENT, kOutputs, TOKENS, kDatatype, ncclFloat16,
     "outputs[TOKENS].datatype: " TYPES "(got float16, expected bfloat16)"},
    {"combine-ht-out-hidden", ARGUMENT, kOutputs, TOKENS, kSize1, 8,
     "outputs[TOKENS].sizes[1]: must be the hidden size of the input tokens (got 8, expected 16)"},
    {"combine-ht-out-data", ARGUMENT, kOutputs, TOKENS, kNullData, 0,
     "outputs[TOKENS].data: " NOT_NULL},
    {"combine-ht-out-align", ARGUMENT, kOutputs, TOKENS, kShiftData, 8,
     "outputs[TOKENS].data: " ALIGNED "16)"},
};

static const BrokenCall kBackwardCombine[] = {
    {"combine-ht-in-weights-ndim", ARGUMENT, kInputs, WEIGHTS, kNdim, 1,
     "inputs[TOPK_WEIGHTS].ndim: " DIMS "(got 1, expected 2)"},
    {"combine-ht-in-weights-datatype", ARGUMENT, kInputs, WEIGHTS, kDatatype, ncclFloat16,
     "inputs[TOPK_WEIGHTS].datatype: " TYPES "(got float16, expected float32)"},
    {"combine-ht-in-weights-rows", ARGUMENT, kInputs, WEIGHTS, kSize0, 1,
     "inputs[TOPK_WEIGHTS].sizes[0]: must be the rows of inputs[TOKENS] (got 1, expected *)"},
    {"combine-ht-in-weights-columns", ARGUMENT, kInputs, WEIGHTS, kSize1, 33,
     "inputs[TOPK_WEIGHTS].sizes[1]: must be at most the largest top-k (got 33, expected 32 or "
     "less)"},
    {"combine-ht-in-weights-data", ARGUMENT, kInputs, WEIGHTS, kNullData, 0,
     "inputs[TOPK_WEIGHTS].data: " NOT_NULL},
    {"combine-ht-in-weights-align", ARGUMENT, kInputs, WEIGHTS, kShiftData, 2,
     "inputs[TOPK_WEIGHTS].data: " ALIGNED "4)"},
    {"combine-ht-out-weights-required", ARGUMENT, kOutputs, WEIGHTS, kRemove, 0,
     "outputs[TOPK_WEIGHTS]: is required"},
    {"combine-ht-out-weights-ndim", ARGUMENT, kOutputs, WEIGHTS, kNdim, 1,
     "outputs[TOPK_WEIGHTS].ndim: " DIMS "(got 1, expected 2)"},
    {"combine-ht-out-weights-datatype", ARGUMENT, kOutputs, WEIGHTS, kDatatype, ncclFloat16,
     "outputs[TOPK_WEIGHTS].datatype: " TYPES "(got float16, expected float32)"},
    {"combine-ht-out-weights-rows", ARGUMENT, kOutputs, WEIGHTS, kSize0, 5,
     "outputs[TOPK_WEIGHTS].sizes[0]: must be the handle's number of tokens (got 5, expected 4)"},
    {"combine-ht-out-weights-columns", ARGUMENT, kOutputs, WEIGHTS, kSize1, 3,
     "outputs[TOPK_WEIGHTS].sizes[1]: must be the columns of inputs[TOPK_WEIGHTS] (got 3, "
     "expected 2)"},
    {"combine-ht-out-weights-data", ARGUMENT, kOutputs, WEIGHTS, kNullData, 0,
     "outputs[TOPK_WEIGHTS].data: " NOT_NULL},
    {"combine-ht-out-weights-align", ARGUMENT, kOutputs, WEIGHTS, kShiftData, 2,
     "outputs[TOPK_WEIGHTS].data: " ALIGNED "4)"},
};

void ht_dispatch_arguments(EpEnv* env) {
    Session session;
    open_session(&session, env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    check_broken_calls(&session, kDispatch, kForwardDispatch, COUNT(kForwardDispatch));
    check_broken_calls(&session, kTokensOnly, kTokensOnlyDispatch, COUNT(kTokensOnlyDispatch));
    check_works(&session);
    close_session(&session);
}

void ht_combine_arguments(EpEnv* env) {
    Session session;
    open_session(&session, env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    check_works(&session);
    check_broken_calls(&session, kCombine, kForwardCombine, COUNT(kForwardCombine));
    check_broken_calls(&session, kBackward, kBackwardCombine, COUNT(kBackwardCombine));
    check_works(&session);
    close_session(&session);
}
