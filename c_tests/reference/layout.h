// How the rows that come to a rank lie in a tensor: the one place of the reference that knows.
#pragma once

#include "harness/base.h"

__BEGIN_DECLS

// Rows in parts of equal room, as [parts, rows, *], or without parts, as [rows, *].
typedef struct {
    unsigned parts;  // 0 without
    unsigned rows;   // that a part has room for, or in all
} RefLayout;

// A part for each local expert: the rows of a (token, k), by source rank, token, k.
RefLayout ref_expert_major(unsigned local_experts, unsigned slots);
// A part for each source rank: one row for each token, in their order.
RefLayout ref_rank_major(unsigned ranks, unsigned max_tokens);
// One row for each token, by source rank, token.
RefLayout ref_flat(unsigned rows);

// Rows of a tensor, used or not.
size_t ref_layout_rows(RefLayout layout);
// The number in the tensor of row `index` of a part; without parts `part` is 0.
size_t ref_layout_row(RefLayout layout, unsigned part, size_t index);
// The sizes of a tensor whose rows have `columns` elements; returns how many there are.
unsigned ref_layout_sizes(RefLayout layout, unsigned columns, unsigned sizes[3]);

__END_DECLS
