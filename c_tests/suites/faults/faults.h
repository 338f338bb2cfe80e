// What the two halves of test_faults share: the kinds of work that a rank can be lost in.
#ifndef C_TESTS_SUITES_FAULTS_FAULTS_H_
#define C_TESTS_SUITES_FAULTS_FAULTS_H_

#include "forked/survivors.h"
#include "reference/ht_run.h"

typedef enum { kLl, kStaged, kHt, kHandles, kGroups, kNumKinds } Kind;

// Work in rounds, each of which needs all ranks.
typedef struct {
    const EpEnv* env;
    Kind kind;
    ncclEpGroup_t group;  // not in kGroups
    LlRun ll;
    HtRun ht;
    void* ids;           // kHandles
    double began;        // the round
    ncclResult_t fault;  // of the call, or of the operation, that failed
    char text[512];      // of that
} Job;

void job_open(Job* job, const EpEnv* env, Kind kind, uint64_t seed);
// One round, with its results compared; false if it failed.
bool job_round(Job* job);
// Ends the handle and the group, also after a failure.
void job_end(Job* job);
// Frees the buffers. An exchange that is stuck would hold this up, so its communicator ends before.
void job_free(Job* job);
// Further calls of a group that has failed are refused.
void job_expect_refusals(Job* job);

#endif  // C_TESTS_SUITES_FAULTS_FAULTS_H_
