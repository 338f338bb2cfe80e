// Two handles of a group, in either mode, and a stream beside that of the environment.
#pragma once

#include "reference/ht_run.h"
#include "reference/ll_run.h"

enum { kPair = 2 };

typedef struct {
    EpEnv* env;
    RefShape shape;
    ncclEpGroup_t group;
    LlRun runs[kPair];
    cudaStream_t aside;
} LlPair;

LlPair ll_pair_open(EpEnv* env, RefStyle style);
// With inputs for an operation of each kind, after a dispatch, which a combine needs before it, also at its capture.
LlPair ll_pair_open_ready(EpEnv* env);
void ll_pair_close(LlPair* pair);
// Launches a graph of a dispatch and a combine of `run`, and checks what comes of it.
void ll_run_replay(LlRun* run, cudaGraphExec_t graph);

typedef struct {
    EpEnv* env;
    RefShape shape;
    ncclEpGroup_t group;
    HtRun runs[kPair];
    cudaStream_t aside;
} HtPair;

HtPair ht_pair_open(EpEnv* env);
void ht_pair_close(HtPair* pair);
// A handle of the pair's group in the place of one that was closed.
HtRun ht_pair_open_run(const HtPair* pair, uint64_t seed);

// Ends the captures of both streams, then makes graphs of them: a capturing thread may not do that.
void end_both_captures(cudaStream_t first, cudaStream_t second, cudaGraphExec_t graphs[kPair]);
