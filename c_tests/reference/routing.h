// The routing of all ranks: the experts of each token and their weights. Every process computes all
// of it from a seed, without a message or a call of the library.
#pragma once

#include "harness/base.h"

__BEGIN_DECLS

// How the ids of a token are drawn. E experts, L on each rank.
typedef enum {
    kRefDistinct,   // different experts while there are enough
    kRefRepeating,  // any experts, so that a token may name one twice
    kRefMessy,      // also negative ids and ids from E on, near and far
    kRefSkewed,     // few experts get most tokens
    kRefOneRank,    // only experts of the last rank
    kRefOneExpert,  // every entry names expert 0: as many copies as there are entries
    kRefNowhere,    // only negative ids
    kRefNumStyles
} RefStyle;

typedef struct {
    unsigned num_ranks;
    unsigned num_experts;
    unsigned top_k;
    unsigned* num_tokens;  // of each rank
    int64_t** topk_idx;    // of each rank: [num_tokens, top_k]
    float** weights;       // of each rank: [num_tokens, top_k]
} RefRouting;

// What groups and tests in both modes are made of.
typedef struct {
    unsigned num_experts;
    unsigned max_tokens;  // in high throughput also 0, NCCL_EP_AUTO
    unsigned top_k;
    ncclDataType_t datatype;
    unsigned hidden;
} RefShape;

// A new routing; `num_tokens` has one entry for each rank and is copied.
RefRouting* ref_routing_new(unsigned num_ranks, unsigned num_experts, unsigned top_k,
                            const unsigned* num_tokens, RefStyle style, uint64_t seed);
// A routing with given ids: those of all ranks, one rank after the other.
RefRouting* ref_routing_of_ids(unsigned num_ranks, unsigned num_experts, unsigned top_k,
                               const unsigned* num_tokens, const int64_t* ids, uint64_t seed);
// A routing of `shape` with token counts full or uneven; up to 9 tokens if the shape leaves their number open.
RefRouting* ref_routing_drawn(unsigned num_ranks, const RefShape* shape, RefStyle style, bool uneven, uint64_t seed);
RefRouting* ref_routing_copy(const RefRouting* routing);
void ref_routing_free(RefRouting* routing);

// Sets about one id in `every` of each rank to -1.
void ref_routing_mask(RefRouting* routing, unsigned every, uint64_t seed);
// Changes the ids of each token in place, as a caller may between a dispatch and its combine.
typedef enum {
    kRefReverse,
    kRefShuffle,
    kRefReplace,  // shuffles, and draws about one id in four anew
    kRefNumChanges
} RefChange;
void ref_routing_change(RefRouting* routing, RefChange change, uint64_t seed);
// Sets the ids of entries to -1 for which their experts have no slot, in the order of slots. So repeated
// ids fill an expert, which low latency allows, but no more than that.
void ref_routing_fit(RefRouting* routing, unsigned capacity);
void ref_routing_new_weights(RefRouting* routing, uint64_t seed);

unsigned ref_local_experts(const RefRouting* routing);
size_t ref_entries_of(const RefRouting* routing, unsigned rank);  // num_tokens * top_k

// The expert that an id names, or -1: negative ids and ids from E on take no part.
int64_t ref_expert_of(const RefRouting* routing, int64_t id);

// Token counts of all ranks, between 0 and `most`: all `most`, or different ones with a zero and
// (on two ranks and more) a `most` among them.
void ref_tokens_full(unsigned* num_tokens, unsigned num_ranks, unsigned most);
void ref_tokens_uneven(unsigned* num_tokens, unsigned num_ranks, unsigned most, uint64_t seed);

__END_DECLS
