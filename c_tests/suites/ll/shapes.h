// The shapes of low-latency tests, and runs of them.
#pragma once

#include "reference/run.h"

typedef struct {
    unsigned local_experts, max_tokens, top_k;
    ncclDataType_t datatype;
    unsigned hidden;
    RefStyle style;
    bool uneven;
} Shape;

// A run in a group of its own.
RefRun open_shape(const EpEnv* env, const Shape* shape, uint64_t seed);
// One in a group of such a shape, whose ranks have `tokens` by turns.
RefRun open_by_turns(const EpEnv* env, const RefShape* shape, const unsigned* tokens, unsigned turns);
// One of a group that is returned, where no rank has a token.
RefRun open_without_tokens(const EpEnv* env);

// A run as open_shape gives it, whose dispatches are rank-major.
void open_by_rank(RefRun* run, const EpEnv* env, const Shape* shape, uint64_t seed);
// A dispatch and its combine, staged.
void pair_in_stages(RefRun* run);
