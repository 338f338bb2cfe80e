// What the two halves of test_faults share: the kinds of work during which a rank can be lost.
#pragma once

#include "forked/survivors.h"
#include "reference/run.h"

typedef enum { kLl, kStaged, kHt, kHandles, kGroups, kNumKinds } Kind;

// Work in rounds that each need all ranks.
typedef struct {
    const EpEnv* env;
    Kind kind;
    ncclEpGroup_t group;  // not in kGroups
    RefRun run;           // kLl, kStaged, kHt
    void* ids;           // kHandles
    double began;        // start of the round
    ncclResult_t fault;  // of the failed call or operation
    char text[512];      // its text
} Job;

void job_open(Job* job, const EpEnv* env, Kind kind, uint64_t seed);
// One round with its results compared; false if it failed.
bool job_round(Job* job);
// Destroys the handle and the group, also after a failure.
void job_end(Job* job);
// Frees the buffers. A stuck exchange would block this, so abort its communicator first.
void job_free(Job* job);
// A failed group refuses further calls.
void job_expect_refusals(Job* job);
