// What the cases of test_death share, in addition to forked/survivors.h.
#pragma once

#include "forked/survivors.h"

enum { kSlackMs = 1000, kPollUs = 500 };

// Whether the creation of a high-throughput handle waits on the host: where the routing decides what is sent over the
// network, and on the CPU backend.
bool host_waits_for_routing(void);

// From now on the network may fail so much later: while memory is freed the device takes no copy, and the network waits
// a while for one by which kernels learn of the failure.
void allow_for_a_free(DeathRank* self);

// A case, as DEATH_CASE, with `run`, which is open; the case closes it.
#define DEATH_WORK_CASE(name, end)                         \
    static void name##_with(DeathRank* self, RefRun* run); \
    DEATH_CASE(name, end) {                                \
        RefRun run = open_work(&self->env, 1);             \
        name##_with(self, &run);                           \
    }                                                      \
    static void name##_with(DeathRank* self, RefRun* run)

// Waits until the group fails; `since` is the earliest time at which it could be known.
void expect_fault(DeathRank* self, ncclEpGroup_t group, double since);
void expect_refusals(RefRun* run);
void close_work(DeathRank* self, RefRun* run);
// Ends a group that nothing has failed in, though it lacks the victim.
void end_without_victim(DeathRank* self, RefRun* run);
void finish_survivor(DeathRank* self, RefRun* run);
// The same on all ranks, where the victim has come back and has learned of the failure.
void finish_behind_a_stall(DeathRank* self, RefRun* run);
