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

// The order in which combines sum, as NCCL_EP_LL_COMBINE says; groups read it when they are made.
//
// kRefExact: a = 0; a = fma(w[k], y[k], a) for k ascending; round(a).
// kRefReduce, the default: an expert rank that the dispatch found once in a token sends the
// expert's row as it is; one that it found more often sends round(p), p = 0; p = fma(w[k], y[k], p)
// for k ascending. At home a = 0; for expert ranks ascending a = fma(w[k], y, a) for a row as it
// is, and a = a + y for a sum; round(a).
// In both, an id that names no expert any more at the combine is left out, also out of a sum; and
// an entry that found no slot counts as a row of zeros. All sums are in fp32.
typedef enum { kRefExact, kRefReduce } RefLlSum;
RefLlSum ref_ll_sum(void);

// Writes all rows of what combine gives to `rank`. `sent` is the routing of the last dispatch,
// `now` that of the combine, whose ids may have been masked since, and which has the weights.
// `expert_rows` has row ref_row_of(expert's rank, slot) for each slot [L * capacity] of that rank.
void ref_ll_combine(const RefRouting* sent, const RefRouting* now, unsigned rank, unsigned capacity,
                    const RefRows* expert_rows, void* out);

#ifdef __cplusplus
}
#endif

#endif  // C_TESTS_REFERENCE_LL_H_
