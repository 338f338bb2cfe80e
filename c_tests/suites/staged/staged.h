// What the cases of test_staged share.
#pragma once

#include "reference/ll_run.h"

// A group and some handles on it, no two with the same data.
enum { kMaxRuns = 4 };
typedef struct {
    ncclEpGroup_t group;
    LlRun runs[kMaxRuns];
    cudaStream_t other;  // a second stream without implicit order
} Setup;

void set_up(Setup* setup, EpEnv* env);
void tear_down(Setup* setup, EpEnv* env);
void open_run(LlRun* run, const EpEnv* env, ncclEpGroup_t group);

void send_dispatch(LlRun* run);
void send_combine(LlRun* run);
void complete(LlRun* run, cudaStream_t stream);  // and waits
// The same, and checks what came.
void complete_dispatch(LlRun* run, cudaStream_t stream);
void complete_combine(LlRun* run, cudaStream_t stream);
