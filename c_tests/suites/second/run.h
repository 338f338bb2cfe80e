// A run of any layout: its buffers, and operations that are compared with the reference, every byte.
#pragma once

#include "reference/layout.h"
#include "reference/zones.h"
#include "suites/second/second.h"

// Every tensor of a run.
enum {
    // This rank's tokens.
    kIds,
    kWeights,
    kTokens,
    kScales,
    // What the experts give for the rows that came.
    kResults,
    kGradientsIn,
    // Outputs, from here on: rows that come, with what is beside them, and what a routing tells.
    kReceived,
    kScalesOut,
    kIdsOut,
    kWeightsOut,
    kCounters,
    kOffsets,
    kTotal,
    // For this rank's tokens.
    kCombined,
    kGradients,
    kNumTensors
};
enum { kFirstOutput = kReceived };
// Rows that the tensors have beyond what the library needs.
enum { kSpare = 3 };

typedef struct {
    const EpEnv* env;
    const Case* test;
    ncclEpGroup_t group;
    ncclEpGroup_t own_group;  // which ends with the run; NULL if it is the caller's
    ncclEpHandle_t handle;    // NULL: there is none
    RefBuffer memory;         // of the handle, if it is the caller's
    unsigned rank, num_tokens;
    uint64_t seed;
    RefRouting* given;
    RefRouting* routing;  // that, without what flat rows drop
    RefLayout layout;     // LL
    RefZones* zones;      // HT by expert: of each rank
    size_t received;      // HT: rows or slots that come
    size_t used;          // HT: those that a dispatch writes at most
    size_t rows;          // HT: of the tensors
    RefRows tokens, results, scales;
    RefBuffer buffers[kNumTensors];
} Run;

// Without a handle yet; in a group of its own if `group` is NULL.
void run_open(Run* run, const EpEnv* env, ncclEpGroup_t group, const Case* test, uint64_t seed);
void run_close(Run* run);
// Other ids and weights for the same tokens, in place.
void run_renew(Run* run, uint64_t seed);
// All outputs are poison from here on; and one check of each: they still are.
void run_poison(const Run* run);
void run_check_untouched(const Run* run);

// The arguments of all calls.
typedef struct {
    View views[kNumTensors];
    ncclEpLayoutInfo_t update;
    ncclEpDispatchInputs_t inputs;
    ncclEpDispatchOutputs_t outputs;
    ncclEpLayoutInfo_t info;
    ncclEpDispatchConfig_t config;
    ncclEpCombineInputs_t combine_inputs;
    ncclEpCombineOutputs_t combine_outputs;
    ncclEpCombineConfig_t combine_config;
} Call;
void call_set(Call* call, const Run* run, ncclEpPassDir_t pass);

// Makes a handle without a routing.
void run_init(Run* run);
// Makes one that is routed; in HT its counters are checked, and the caller's ids are gone afterwards.
void run_route(Run* run);
// Destroys the handle.
void run_end_handle(Run* run);
// Makes another handle in memory of the caller's that has the bytes of the one before, which stays the caller's to end.
void run_copy(Run* run);
// The same, with which the handle before ends.
void run_move(Run* run);
// Operations as a program of the case's generation calls them; nothing of what it passes is left afterwards.
ncclResult_t run_update(const Run* run);
ncclResult_t run_dispatch(const Run* run, ncclEpPassDir_t pass);
ncclResult_t run_combine(const Run* run, ncclEpPassDir_t pass);

// What the last ones must have left, once the stream of the environment has ended; counters are poison afterwards.
void run_check_counters(const Run* run);
void run_check_dispatch(const Run* run, ncclEpPassDir_t pass);
void run_check_combine(const Run* run, ncclEpPassDir_t pass);
// Both operations of a pass, checked.
void run_exchange(const Run* run, ncclEpPassDir_t pass);
