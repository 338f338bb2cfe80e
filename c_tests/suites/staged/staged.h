// What the cases of test_staged share.
#pragma once

#include "reference/ll_run.h"

// A group and some handles on it, no two with the same data.
enum { kMaxRuns = 4 };
typedef struct {
    const EpEnv* env;
    ncclEpGroup_t group;
    LlRun runs[kMaxRuns];
    cudaStream_t other;  // a second stream without implicit order
} Setup;

Setup set_up(EpEnv* env);
void tear_down(Setup* setup);
LlRun open_run(const EpEnv* env, ncclEpGroup_t group);
// A case with a `setup`.
#define STAGED_TEST(name) EP_TEST_WITH(EP_TEST, name, Setup, setup, set_up, tear_down)

void send_dispatch(LlRun* run);
void send_combine(LlRun* run);
void complete(LlRun* run, cudaStream_t stream);  // and waits
// The same, and checks what came.
void complete_dispatch(LlRun* run, cudaStream_t stream);
void complete_combine(LlRun* run, cudaStream_t stream);
