// Rows of tables of broken calls: one tensor of a call with one thing wrong, and the refusal's
// text, which is made from the same arguments.
#ifndef C_TESTS_SUITES_ERRORS_CALLS_H_
#define C_TESTS_SUITES_ERRORS_CALLS_H_

#include "suites/errors/errors.h"

// No macros, as their own names are pasted below.
enum {
    TOKENS = NCCL_EP_TENSOR_TAG_TOKENS,
    IDS = NCCL_EP_TENSOR_TAG_TOPK_IDX,
    WEIGHTS = NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS,
    SCALES = NCCL_EP_TENSOR_TAG_SCALES,
    COUNTER = NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE,
};

// How texts name a tensor: by its list and the name of its tag.
#define NAME_kInputs "inputs"
#define NAME_kOutputs "outputs"
#define NAME_kLocals "local_tensors"
#define NAME_TOKENS "[TOKENS]"
#define NAME_IDS "[TOPK_IDX]"
#define NAME_WEIGHTS "[TOPK_WEIGHTS]"
#define NAME_SCALES "[SCALES]"
#define NAME_COUNTER "[RECV_EXPERT_COUNTER_DEVICE]"
#define TENSOR(list, tag) NAME_##list NAME_##tag

#define BROKEN(id, list, tag, change, value, text) \
    {id, ncclInvalidArgument, list, tag, change, value, text}
#define UNSUPPORTED(id, list, tag, change, value, text) \
    {id, ncclInvalidUsage, list, tag, change, value, text}

#define MISSING(id, list, tag) \
    BROKEN(id, list, tag, kRemove, 0, TENSOR(list, tag) ": is required")
#define NDIM(id, list, tag, got, expected)                                                      \
    BROKEN(id, list, tag, kNdim, got,                                                           \
           TENSOR(list, tag) ".ndim: must be the number of dimensions that this tensor has in " \
                             "this call (got " #got ", expected " #expected ")")
#define DATATYPE(id, list, tag, value, got, expected)                                        \
    BROKEN(id, list, tag, kDatatype, value,                                                  \
           TENSOR(list, tag) ".datatype: must be an element type that this tensor may have " \
                             "(got " got ", expected " expected ")")
// `axis` is the size that is wrong.
#define SIZE(id, list, tag, axis, got, rule, expected) \
    BROKEN(id, list, tag, kSize##axis, got,            \
           TENSOR(list, tag) ".sizes[" #axis "]: " rule " (got " #got ", expected " expected ")")
#define ROW(id, list, tag, axis, value, rule, got, expected)              \
    BROKEN(id, list, tag, kSize##axis, value,                             \
           TENSOR(list, tag) ".sizes[" #axis "]: a row " rule " (got " got \
                             " bytes, expected " expected " bytes)")
#define NO_DATA(id, list, tag)                \
    BROKEN(id, list, tag, kNullData, 0,       \
           TENSOR(list, tag) ".data: must not be NULL unless the tensor is empty")
#define ALIGNMENT(id, list, tag, shift, bytes)                                            \
    BROKEN(id, list, tag, kShiftData, shift,                                              \
           TENSOR(list, tag) ".data: must be aligned for its elements (got 0x*, expected " \
                             "a multiple of " #bytes ")")
#define FP8_TOKENS(id)                                                                        \
    UNSUPPORTED(id, kInputs, TOKENS, kDatatype, 10,                                           \
                "inputs[TOKENS].datatype: FP8 tokens are not supported yet (got float8e4m3, " \
                "expected bfloat16, float16 or float32)")
#define FP8_SCALES(id, list)                  \
    UNSUPPORTED(id, list, SCALES, kAdd, 0,    \
                TENSOR(list, SCALES) ": FP8 tokens with scales are not supported yet")

#endif  // C_TESTS_SUITES_ERRORS_CALLS_H_
