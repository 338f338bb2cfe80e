// Two handles of a group, in either mode, and a stream beside that of the environment.
#pragma once

#include "harness/graphs.h"
#include "reference/run.h"

enum { kPair = 2 };

typedef struct {
    RefRun runs[kPair];
    cudaStream_t aside;
} Pair;

Pair pair_open(EpEnv* env, bool ht);
// With inputs for an operation of each kind, after a dispatch, which a combine of low latency needs before it, also at
// its capture.
Pair pair_open_ready(EpEnv* env, bool ht);
void pair_close(Pair* pair);
// A handle of the pair's group.
RefRun pair_open_run(const Pair* pair, uint64_t seed);

// Launches a graph of these three times, checks what comes of it each time, and releases the graph.
void replay_pair(RefRun* run, cudaGraphExec_t graph);
