// The expected results of high-throughput operations, by walks over all tokens of all ranks in the
// documented order: source rank, then token; a token comes once per destination rank.
#pragma once

#include "reference/routing.h"
#include "reference/rows.h"

__BEGIN_DECLS

// Rows that `rank` receives, and how many of them use each of its L experts.
unsigned ref_ht_received(const RefRouting* routing, unsigned rank);
void ref_ht_counts(const RefRouting* routing, unsigned rank, int32_t* counts);

// The routing without the ids of rows beyond the first `most` of a rank, a new one.
RefRouting* ref_ht_cut(const RefRouting* routing, unsigned most);

// The tokens that `rank` receives, in row order, as row numbers ref_row_of(source, token); the caller frees them.
uint64_t* ref_ht_rows(const RefRouting* routing, unsigned rank);

// The whole token output [num_rows, hidden] of `rank`; `tokens` has row ref_row_of(source, token).
void ref_ht_dispatch_tokens(const RefRouting* routing, unsigned rank, const RefRows* tokens,
                            unsigned num_rows, void* out);

// The whole ids and weights outputs [num_rows, top_k] of `rank`. `given` has the ids and weights
// that the dispatch was called with, `routing` those of the handle.
void ref_ht_dispatch_routing(const RefRouting* routing, const RefRouting* given, unsigned rank,
                             unsigned num_rows, int64_t* ids, float* weights);

// The whole output [num_tokens, hidden] of combine on `rank`; `expert_rows` has row
// ref_row_of(destination, row) for each row that a destination received.
void ref_ht_combine(const RefRouting* routing, unsigned rank, const RefRows* expert_rows, void* out);

// The whole weight gradients [num_tokens, columns] of `rank`. The gradient that `destination` puts
// into column c of its row r is ref_weight(seed, destination, r * columns + c).
void ref_ht_gradients(const RefRouting* routing, unsigned rank, unsigned columns, uint64_t seed, float* out);

// The same in the order of a token's ids, [num_tokens, top_k]: each gets the gradient of its expert, also a repeated
// one, and one that names no expert 0.
void ref_ht_gradients_by_k(const RefRouting* routing, unsigned rank, uint64_t seed, float* out);

__END_DECLS
