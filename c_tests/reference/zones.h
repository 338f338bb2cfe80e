// The expected results of high-throughput operations whose rows lie by expert, by walks in the documented order: local
// expert, source rank, token. An expert's rows begin at a multiple of an alignment, and zeros fill its zone.
#pragma once

#include "reference/routing.h"
#include "reference/rows.h"

__BEGIN_DECLS

// The zones of one rank.
typedef struct {
    const RefRouting* routing;
    unsigned rank;
    unsigned most;     // slots that there are; what comes beyond is dropped
    size_t* begins;    // of each local expert, then the number of all slots
    size_t* slots;     // of (token of any rank, local expert), dropped or not; kRefNoSlot
    size_t* first_of;  // of each rank, its first token among those of all
} RefZones;

#define kRefNoSlot (~(size_t)0)

// Those of every rank.
RefZones* ref_zones_new(const RefRouting* routing, unsigned alignment, unsigned most);
void ref_zones_free(RefZones* zones);

// Slots of an expert's zone that there are; and where it begins, the end of all if it has none.
size_t ref_zones_length(const RefZones* zones, unsigned expert);
size_t ref_zones_begin(const RefZones* zones, unsigned expert);

// Writes rows, and zeros where a zone has none; slots that are no zone's stay as they are.
void ref_zones_dispatch(const RefZones* zones, const RefRows* tokens, void* out);
// Writes all of `weights` [slots].
void ref_zones_weights(const RefZones* zones, size_t slots, float* weights);

// The whole output of a combine on `rank`, where `expert_rows` has row ref_row_of(destination, slot); and of the
// gradients of weights, [num_tokens, top_k], which are ref_weight(seed, destination, slot). `all` has the zones of
// every rank.
void ref_zones_combine(const RefZones* all, unsigned rank, const RefRows* expert_rows, void* out);
void ref_zones_gradients(const RefZones* all, unsigned rank, uint64_t seed, float* out);

__END_DECLS
