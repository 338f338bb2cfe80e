// What low-latency operations must give, computed in one straight walk over all entries of all
// ranks in the documented order: source rank, then token, then k.
#ifndef C_TESTS_REFERENCE_LL_H_
#define C_TESTS_REFERENCE_LL_H_

#include "reference/routing.h"
#include "reference/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

// Writes what dispatch puts into the packed output [L, capacity, hidden] of `rank`, and nothing
// else, so that the caller's poison stays in unused slots. `tokens` has row ref_row_of(source,
// token) for each token. `counts` gets the L numbers of used slots. Either output may be NULL.
void ref_ll_dispatch(const RefRouting* routing, unsigned rank, unsigned capacity,
                     const RefRows* tokens, void* packed, int32_t* counts);

// Writes all rows of what combine gives to `rank`. `sent` is the routing of the last dispatch,
// `now` that of the combine, whose ids may have been masked since, and which has the weights.
// `expert_rows` has row ref_row_of(expert's rank, slot) for each slot [L * capacity] of that rank.
void ref_ll_combine(const RefRouting* sent, const RefRouting* now, unsigned rank, unsigned capacity,
                    const RefRows* expert_rows, void* out);

#ifdef __cplusplus
}
#endif

#endif  // C_TESTS_REFERENCE_LL_H_
