// Rows and weights as functions of a seed and a number: any rank computes those of any other,
// without a message. The values make mistakes visible: large numbers that cancel show the order of
// a sum, full mantissas its rounding, and zeros of both signs its start.
#pragma once

#include "harness/base.h"

__BEGIN_DECLS

// A family of rows: row `index` of the seed.
typedef struct {
    ncclDataType_t datatype;  // bfloat16, float16 or float32
    unsigned hidden;          // elements of a row
    uint64_t seed;
    bool any_bits;  // not numbers only: some words are kRefSentinel
} RefRows;

// The word that marks a row as not arrived in the low-latency kernels (LL_SENTINEL). Rows may contain it.
#define kRefSentinel 0xffe7ff93u

size_t ref_row_bytes(const RefRows* rows);

// Writes row `index` to `out`: finite numbers unless `any_bits`.
void ref_row_fill(const RefRows* rows, uint64_t index, void* out);

// The number of a row that belongs to `row` of `rank`.
uint64_t ref_row_of(unsigned rank, size_t row);

// Writes `count` rows of `rank`, the first of them its row `first`.
void ref_rows_fill(const RefRows* rows, unsigned rank, size_t first, size_t count, void* out);

// How many of the rows at `actual` differ from those with these numbers.
size_t ref_rows_wrong(const RefRows* rows, const uint64_t* numbers, size_t count, const void* actual);

// A weight between -2 and 2, never zero; half of them are powers of two, so that sums can cancel.
float ref_weight(uint64_t seed, unsigned rank, size_t index);

__END_DECLS
