// The cast to e4m3 as docs/formats.md defines it, by the steps between its numbers: slow, and unlike any kernel.
#pragma once

#include "reference/format.h"

__BEGIN_DECLS

// The e4m3 nearest to `value`; of two the even one.
uint8_t ref_e4m3(float value);

// The payload and the scales of one row of `format`, a cast.
void ref_cast_row(const RefFormat* format, const void* row, uint8_t* payload, void* scales);

// The row `number`, ref_row_of(rank, token), to be cast: zeros, ties, numbers of all sizes, NaN and infinities.
void ref_cast_input(const RefFormat* format, uint64_t seed, uint64_t number, void* row);

__END_DECLS
