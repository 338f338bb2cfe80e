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

void ll_pair_open(LlPair* pair, EpEnv* env, RefStyle style);
// With inputs for an operation of each kind, after a dispatch, which a combine needs before it,
// also at its capture.
void ll_pair_open_ready(LlPair* pair, EpEnv* env);
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

void ht_pair_open(HtPair* pair, EpEnv* env);
void ht_pair_close(HtPair* pair);
// A handle of the pair's group in the place of one that was closed.
void ht_pair_open_run(HtPair* pair, HtRun* run, uint64_t seed);

// Ends the captures of both streams, then makes graphs of them: a capturing thread may not do that.
void end_both_captures(cudaStream_t first, cudaStream_t second, cudaGraphExec_t graphs[kPair]);
