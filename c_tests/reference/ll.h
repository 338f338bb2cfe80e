// The expected results of low-latency operations, by one walk over all entries of all ranks in the documented order:
// source rank, then token, then k. Ids must leave a slot for each of them (ref_routing_fit).
#pragma once

#include "reference/layout.h"
#include "reference/routing.h"
#include "reference/rows.h"

__BEGIN_DECLS

// The tokens in the used slots of `rank`, expert by expert, as row numbers ref_row_of(source,
// token); the caller frees them. `counts` gets how many slots each of the L experts uses.
uint64_t* ref_ll_slots(const RefRouting* routing, unsigned rank, RefLayout layout, int32_t* counts);

// Writes the used slots of the packed output of `rank`; the caller's poison stays in the others. `tokens` has row
// ref_row_of(source, token) for each token. `counts` gets the L numbers of used slots and may be NULL.
void ref_ll_dispatch(const RefRouting* routing, unsigned rank, RefLayout layout,
                     const RefRows* tokens, void* packed, int32_t* counts);

// Writes the experts' rows into the used slots of `rank`: row ref_row_of(rank, slot) into slot
// of its layout; the others stay as they are.
void ref_ll_results(const RefRouting* routing, unsigned rank, RefLayout layout, const RefRows* expert_rows, void* out);

// The order in which combines sum, as NCCL_EP_LL_COMBINE says; groups read it when they are made.
//
// The rows are those of the last dispatch. Entry k of the combine's ids refers to a dispatched entry with the same id:
// the m-th that names an expert to the m-th that was dispatched to it, further ones to the last. The weight w of a
// dispatched entry is the sum, by ascending k, of the weights of all k that refer to it. Entries that no k refers to,
// and ids that were not dispatched, are left out.
//
// kRefExact: a = 0; a = fma(w, y, a) for the entries in the order of the first k that means each;
// round(a).
// kRefReduce, the default over several nodes, and on one unless ref_ll_sum_unset says otherwise: an expert rank that
// the dispatch found once in a token sends the expert's row as it is; one that it found more often sends round(p), p =
// 0; p = fma(w, y, p) for its entries as dispatched. At home a = 0; for expert ranks ascending a = fma(w, y, a) for a
// row as it is, and a = a + y for a sum; round(a). Over several nodes that is the sum of the home's own node; each
// other one, from the home's backwards around the ring of nodes (harness/nodes.h), adds round(b) if it hosts an expert
// of the token, b being its own such sum from 0. With ep_sums_are_invariant the home's node does so, too, and nodes
// come in ascending order. All sums are in fp32.
typedef enum { kRefExact, kRefReduce } RefLlSum;
extern RefLlSum ref_ll_sum_unset;  // without the variable
RefLlSum ref_ll_sum(void);

// Writes the whole output of combine on `rank`. `sent` is the routing of the last dispatch; `now`
// is that of the combine, with the weights and ids that may have changed since. `expert_rows` has
// row ref_row_of(expert's rank, slot) for each slot of its layout of that rank.
void ref_ll_combine(const RefRouting* sent, const RefRouting* now, unsigned rank, RefLayout layout,
                    const RefRows* expert_rows, void* out);
// The same in an order that somebody has chosen.
void ref_ll_combine_as(RefLlSum order, const RefRouting* sent, const RefRouting* now, unsigned rank,
                       RefLayout layout, const RefRows* expert_rows, void* out);

__END_DECLS
