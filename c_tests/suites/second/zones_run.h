// A run of high throughput, expert-major: its buffers, and operations that are compared with the reference.
#pragma once

#include "reference/zones.h"
#include "suites/second/second.h"

typedef struct {
    Inputs in;
    RefZones* zones;  // of each rank
    const RefZones* own;
    size_t used;  // slots that operations may use
    size_t slots;
    uint64_t seed;
    ncclDataType_t counter;
    RefBuffer tokens_out, weights_out, counters, offsets, total, results_in, gradients_in, gradients,
        scales_out;
} ZonesRun;

void zones_open(ZonesRun* run, const EpEnv* env, const Case* test, uint64_t seed);
void zones_close(ZonesRun* run);
// Other ids and weights for the same tokens, in place.
void zones_renew(ZonesRun* run, uint64_t seed);

// What an update writes for the caller, and what it must have written.
typedef struct {
    View counters, offsets, total;
    ncclEpLayoutInfo_t info;
} ZonesCounters;

void zones_set_counters(const ZonesRun* run, ZonesCounters* it);
// Poisons them afterwards.
void zones_check_counters(const ZonesRun* run);

ncclResult_t zones_launch_dispatch(const ZonesRun* run, ncclEpHandle_t handle, ncclEpPassDir_t pass);
ncclResult_t zones_launch_combine(const ZonesRun* run, ncclEpHandle_t handle, ncclEpPassDir_t pass);
// What the last operation must have left.
void zones_check_dispatch(const ZonesRun* run, ncclEpPassDir_t pass);
void zones_check_combine(const ZonesRun* run, ncclEpPassDir_t pass);
// Both operations of a pass, checked.
void zones_exchange(const ZonesRun* run, ncclEpHandle_t handle, ncclEpPassDir_t pass);
