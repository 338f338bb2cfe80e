// A run of high throughput, flat: its buffers, and operations that are compared with the reference.
#pragma once

#include "suites/second/second.h"

// Rows that the tensors have beyond the group's bound.
enum { kHtSpare = 3 };

typedef struct {
    Inputs in;
    unsigned received;
    unsigned used;  // rows that a dispatch writes
    unsigned rows;  // of the tensors
    uint64_t seed;
    RefBuffer tokens_out, ids_out, weights_out, counters, total, results_in, gradients_in, gradients,
        scales_out;
} HtRun;

void ht_open(HtRun* run, const EpEnv* env, const Case* test, uint64_t seed);
void ht_close(HtRun* run);
// Other ids and weights for the same tokens, in place.
void ht_renew(HtRun* run, uint64_t seed);

// A handle that was routed; its counters are checked. The caller's ids are gone afterwards.
ncclEpHandle_t ht_handle(const HtRun* run, ncclEpGroup_t group);

// An update of a handle that there is, and what it must have told.
ncclResult_t ht_launch_update(const HtRun* run, ncclEpHandle_t handle);
void ht_check_counters(const HtRun* run);

ncclResult_t ht_launch_dispatch(const HtRun* run, ncclEpHandle_t handle);
ncclResult_t ht_launch_combine(const HtRun* run, ncclEpHandle_t handle);
// A dispatch of tokens alone, and a combine with gradients.
ncclResult_t ht_launch_dispatch_back(const HtRun* run, ncclEpHandle_t handle);
ncclResult_t ht_launch_combine_back(const HtRun* run, ncclEpHandle_t handle);

// Poisons the outputs.
void ht_poison(const HtRun* run);
// What the last operation of a kind must have left.
void ht_check_dispatch(const HtRun* run);
void ht_check_dispatch_back(const HtRun* run);
void ht_check_combine(const HtRun* run);
void ht_check_combine_back(const HtRun* run);
// All four, one after the other.
void ht_exchange(const HtRun* run, ncclEpHandle_t handle);
