// Runs of low-latency tests.
#pragma once

#include "suites/both/both.h"

// One in a group of such a shape, whose ranks have `tokens` by turns.
RefRun open_by_turns(const EpEnv* env, const RefShape* shape, const unsigned* tokens, unsigned turns);
// One of a group that is returned, where no rank has a token.
RefRun open_without_tokens(const EpEnv* env);

// A run of a shape, whose dispatches are rank-major.
void open_by_rank(RefRun* run, const EpEnv* env, const Shape* shape, uint64_t seed);
// A dispatch and its combine, staged.
void pair_in_stages(RefRun* run);
