// The expected results of rank-major low-latency operations: a token's row comes once to each rank that hosts one of
// its experts, those of a source together, in the order of its tokens.
#pragma once

#include "reference/layout.h"
#include "reference/routing.h"
#include "reference/rows.h"

__BEGIN_DECLS

// How many rows come from each source to `rank`.
void ref_rank_counts(const RefRouting* routing, unsigned rank, int32_t* counts);

// Calls `each` for every row that comes to `rank`, with its source, token and row. Layouts are rank-major.
typedef void (*RefRankRowFn)(unsigned source, size_t token, size_t row, void* context);
void ref_rank_each(const RefRouting* routing, unsigned rank, RefLayout layout, RefRankRowFn each, void* context);

// Writes all of `ids` [R, M, K] of `rank`: local ids, -1 elsewhere and in unused rows; and of `weights`
// [R, M, K] the rows that come.
void ref_rank_beside(const RefRouting* routing, unsigned rank, RefLayout layout, int64_t* ids, float* weights);

// Writes the experts' rows into the used rows of `rank`: row ref_row_of(rank, row) there.
void ref_rank_results(const RefRouting* routing, unsigned rank, RefLayout layout,
                      const RefRows* expert_rows, void* out);

// Writes the whole output of combine on `rank`; `sent` is the routing of the last dispatch. a = 0; a = a + y for one
// row of each rank that hosts an expert of the token, in the order of the first k that names the rank; round(a). Over
// several nodes node by node, as ref_ll_combine does. All sums are in fp32.
void ref_rank_combine(const RefRouting* sent, unsigned rank, RefLayout layout, const RefRows* expert_rows, void* out);

__END_DECLS
