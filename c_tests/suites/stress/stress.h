// What the two halves of test_stress share: groups with handles, and a batch of operations on them.
#pragma once

#include "reference/run.h"

enum { kGroups = 2, kHandles = 3, kMostPending = 2 };

// The operation that is pending on a handle, or that it has run in a batch.
typedef enum { kNothing, kDispatch, kCombine } Operation;

typedef struct {
    RefRun run;
    Operation pending;  // staged, and not completed yet
    bool combined;      // in this batch
} StressHandle;

typedef struct {
    ncclEpGroup_t group;
    RefShape shape;
    StressHandle handles[kHandles];
    unsigned num_pending;
} StressGroup;

typedef struct {
    const EpEnv* env;
    uint64_t plan;    // the same random numbers on every rank
    uint64_t delays;  // different ones on every rank
    StressGroup groups[kGroups];
} Stress;

// Launches at least `num_ops` operations back to back, then compares. With `snapshots` the output of every single
// operation is copied on the stream and compared, otherwise the last ones are. Returns the number of operations.
unsigned stress_batch(Stress* stress, unsigned num_ops, bool snapshots);
