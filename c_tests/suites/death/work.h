// What the cases of test_death share, in addition to forked/survivors.h.
#ifndef C_TESTS_SUITES_DEATH_WORK_H_
#define C_TESTS_SUITES_DEATH_WORK_H_

#include "forked/survivors.h"

enum { kSlackMs = 1000, kPollUs = 500 };

// Whether the creation of a high-throughput handle waits on the host: where the routing decides what is sent over the
// network, and on the CPU backend.
bool host_waits_for_routing(void);

// From now on the network may fail so much later: while memory is freed the device takes no copy, and the network waits
// a while for one by which kernels learn of the failure.
void allow_for_a_free(DeathRank* self);

// Waits until the group fails; `since` is the earliest time at which it could be known.
void expect_fault(DeathRank* self, ncclEpGroup_t group, double since);
void expect_refusals(Work* work);
void close_work(DeathRank* self, Work* work);
// Ends a group that nothing has failed in, though it lacks the victim.
void end_without_victim(DeathRank* self, Work* work);
void finish_survivor(DeathRank* self, Work* work);
// The same on all ranks, where the victim has come back and has learned of the failure.
void finish_behind_a_stall(DeathRank* self, Work* work);

// ---- Cases of other files ----------------------------------------------------------------------

void dies_before_creation(DeathRank* self);  // creation.c
void stops_in_creation(DeathRank* self);
void dies_before_an_operation_and_a_handle(DeathRank* self);
void creation_is_lost_beside_a_group(DeathRank* self);
void creation_is_lost_after_a_failure(DeathRank* self);
void group_ends_behind_a_lost_creation(DeathRank* self);
void creation_is_lost_while_memory_is_freed(DeathRank* self);
void dies_before_a_replay(DeathRank* self);  // replay.c
void dies_before_a_replay_and_a_free(DeathRank* self);
void dies_before_a_replay_and_destructions(DeathRank* self);
void dies_before_an_ht_replay(DeathRank* self);
void stalls_where_no_thread_is_left(DeathRank* self);  // last_resort.c
void several_groups_lose_a_rank_while_memory_is_freed(DeathRank* self);

#endif  // C_TESTS_SUITES_DEATH_WORK_H_
