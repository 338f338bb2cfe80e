// Rows of tables of broken calls: one tensor with one thing wrong, and the text of the refusal,
// built from the same arguments.
#pragma once

#include "suites/errors/errors.h"

// Not macros: the names below are pasted.
enum {
    TOKENS = NCCL_EP_TENSOR_TAG_TOKENS,
    IDS = NCCL_EP_TENSOR_TAG_TOPK_IDX,
    WEIGHTS = NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS,
    SCALES = NCCL_EP_TENSOR_TAG_SCALES,
    COUNTER = NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE,
};

// How texts name a tensor: its list and the name of its tag.
#define NAME_kInputs "inputs"
#define NAME_kOutputs "outputs"
#define NAME_kLocals "local_tensors"
#define NAME_TOKENS "[TOKENS]"
#define NAME_IDS "[TOPK_IDX]"
#define NAME_WEIGHTS "[TOPK_WEIGHTS]"
#define NAME_SCALES "[SCALES]"
#define NAME_COUNTER "[RECV_EXPERT_COUNTER_DEVICE]"
#define TENSOR(list, tag) NAME_##list NAME_##tag

#define BROKEN(id, list, tag, change, value, text) {id, ncclInvalidArgument, list, tag, change, value, text}
#define UNSUPPORTED(id, list, tag, change, value, text) {id, ncclInvalidUsage, list, tag, change, value, text}

#define MISSING(id, list, tag) BROKEN(id, list, tag, kRemove, 0, TENSOR(list, tag) ": is required")
#define NDIM(id, list, tag, got, expected) \
    BROKEN(id, list, tag, kNdim, got,                                                           \
           TENSOR(list, tag) ".ndim: must be the number of dimensions that this tensor has in " \
                             "this call (got " #got ", expected " #expected ")")
#define DATATYPE(id, list, tag, value, got, expected) \
    BROKEN(id, list, tag, kDatatype, value,                                                  \
           TENSOR(list, tag) ".datatype: must be an element type that this tensor may have " \
                             "(got " got ", expected " expected ")")
// `axis` is the wrong extent.
#define SIZE(id, list, tag, axis, got, rule, expected) \
    BROKEN(id, list, tag, kSize##axis, got,            \
           TENSOR(list, tag) ".sizes[" #axis "]: " rule " (got " #got ", expected " expected ")")
#define ROW(id, axis, value, rule, got, expected)                                                             \
    BROKEN(id, kInputs, TOKENS, kSize##axis, value,                                                           \
           TENSOR(kInputs, TOKENS) ".sizes[" #axis "]: a row " rule " (got " got " bytes, expected " expected \
                                   " bytes)")
// Rows of no element, of 12 elements, and of more bytes than the group's 64.
#define ROWS(odd, most, axis)                                                                    \
    ROW(odd, axis, 0, "must be a positive multiple of 16 bytes", "0", "a multiple of 16"),       \
        ROW(odd, axis, 12, "must be a positive multiple of 16 bytes", "24", "a multiple of 16"), \
        ROW(most, axis, 40, "must not exceed the group's token_size_bytes", "80", "at most 64")
// No data; and data that are aligned for half of the `bytes` that they need.
#define DATA(missing, unaligned, list, tag, bytes) \
    BROKEN(missing, list, tag, kNullData, 0,                                              \
           TENSOR(list, tag) ".data: must not be NULL unless the tensor is empty"),       \
    BROKEN(unaligned, list, tag, kShiftData, bytes / 2,                                   \
           TENSOR(list, tag) ".data: must be aligned for its elements (got 0x*, expected " \
                             "a multiple of " #bytes ")")
#define OTHER_TYPE(id, list, tag, value, rule, got, expected) \
    BROKEN(id, list, tag, kDatatype, value,                   \
           TENSOR(list, tag) ".datatype: " rule " (got " got ", expected " expected ")")
#define UNKNOWN_TYPE(id, list, tag) DATATYPE(id, list, tag, 77, "an unknown number", "an NCCL element type")
// Rows of a dispatch keep their type.
#define CHANGED_ROWS(id, list, value, got, expected)                                            \
    BROKEN(id, list, TOKENS, kDatatype, value,                                                  \
           "outputs[TOKENS].datatype: must be the type of inputs[TOKENS], or of one byte with " \
           "outputs[SCALES] (got " got ", expected " expected ")")
#define NOT_SUMMED(id, value, got)                                                      \
    UNSUPPORTED(id, kInputs, TOKENS, kDatatype, value,                                  \
                "inputs[TOKENS].datatype: a combine sums bfloat16, float16 or float32 " \
                "(got " got ", expected bfloat16, float16 or float32)")
#define NO_SUMMED_SCALES(id, list) \
    BROKEN(id, list, SCALES, kAdd, 0, TENSOR(list, SCALES) ": a combine sums rows, which have no scales")
