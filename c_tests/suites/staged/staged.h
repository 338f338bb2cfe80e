// What the cases of test_staged share.
#pragma once

#include "reference/run.h"

// Some handles of one group, no two with the same data. The group is the first one's.
enum { kMaxRuns = 4 };
typedef struct {
    RefRun runs[kMaxRuns];
    cudaStream_t other;  // a second stream without implicit order
} Setup;

Setup set_up(EpEnv* env);
void tear_down(Setup* setup);
RefRun open_run(const EpEnv* env, ncclEpGroup_t group);
// A case with a `setup`.
#define STAGED_TEST(name) EP_TEST_WITH(EP_TEST, name, Setup, setup, set_up, tear_down)

void send_dispatch(RefRun* run);
void send_combine(RefRun* run);
void complete(RefRun* run, cudaStream_t stream);  // and waits
// The same, and checks what came.
void complete_dispatch(RefRun* run, cudaStream_t stream);
void complete_combine(RefRun* run, cudaStream_t stream);
