// What the cases of test_death share: a group with a handle, and what a survivor checks.
#ifndef C_TESTS_SUITES_DEATH_WORK_H_
#define C_TESTS_SUITES_DEATH_WORK_H_

#include "reference/ll_run.h"
#include "suites/death/ranks.h"

enum { kSlackMs = 1000, kPollUs = 500 };

typedef struct {
    ncclEpGroup_t group;
    LlRun run;
} Work;

LlShape shape_for(const EpEnv* env);
void open_work(Work* work, const EpEnv* env, uint64_t seed);
int survivors(const DeathRank* self);
// A high-throughput handle for one token with one id.
ncclResult_t create_ht_handle(const EpEnv* env, ncclEpGroup_t group, void* ids,
                              ncclEpHandle_t* handle);

// Not later than the deadline and some slack after `since`.
void check_in_time(const DeathRank* self, double since);
// Whether a text names a rank.
bool names(const char* text, int rank);
// Waits for the failure of the group; `since` is when it could first be known.
void expect_fault(DeathRank* self, ncclEpGroup_t group, double since);
void expect_context_usable(const DeathRank* self);
void expect_refusals(Work* work);
void close_work(DeathRank* self, Work* work);
// A new communicator and a new group without the victim: nothing of the failure is left.
void go_on_without_victim(DeathRank* self);
// Ends what is left of the first communicator, and goes on.
void abort_and_go_on(DeathRank* self);
void finish_survivor(DeathRank* self, Work* work);

// ---- Cases of other files ----------------------------------------------------------------------

void dies_before_creation(DeathRank* self);  // creation.c
void stops_in_creation(DeathRank* self);
void dies_before_an_operation_and_a_handle(DeathRank* self);
void creation_is_lost_beside_a_group(DeathRank* self);

#endif  // C_TESTS_SUITES_DEATH_WORK_H_
