// What survivors of a lost rank check, and how they go on without it.
#ifndef C_TESTS_FORKED_SURVIVORS_H_
#define C_TESTS_FORKED_SURVIVORS_H_

#include "forked/ranks.h"
#include "reference/ll_run.h"

// A small low-latency group with a handle.
typedef struct {
    ncclEpGroup_t group;
    LlRun run;
} Work;

LlShape shape_for(const EpEnv* env);
// All ranks; with a first dispatch and combine.
void open_work(Work* work, const EpEnv* env, uint64_t seed);

int survivors(const DeathRank* self);

// Whether so much time is left since then that a wait may not be over yet.
bool in_time(const DeathRank* self, double since);
// A failure says by how much it was too late.
void check_in_time(const DeathRank* self, double since);

// Whether a text has the number of this rank.
bool names(const char* text, int rank);

void expect_context_usable(const DeathRank* self);

// A new communicator and a new group without the victim: nothing of the failure is left.
void go_on_without_victim(DeathRank* self);
// Ends what is left of the first communicator, and goes on.
void abort_and_go_on(DeathRank* self);

#endif  // C_TESTS_FORKED_SURVIVORS_H_
