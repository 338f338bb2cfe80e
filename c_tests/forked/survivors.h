// What the survivors of a lost rank check, and how they continue without it.
#pragma once

#include "forked/ranks.h"
#include "reference/run.h"

RefShape shape_for(const EpEnv* env);
// Opens a small low-latency group with a handle on all ranks, and runs a first dispatch and combine.
RefRun open_work(const EpEnv* env, uint64_t seed);

int survivors(const DeathRank* self);

// Whether `since` is so recent that a wait begun then may still be running.
bool in_time(const DeathRank* self, double since);
// As a check; a failure says how late it was.
void check_in_time(const DeathRank* self, double since);

// Checks that `text` says which rank waited, or between which ranks the network failed.
void expect_waiter_named(const char* text);

// Whether `text` contains the number of this rank.
bool names(const char* text, int rank);

// Checks, after the texts of all survivors, that one of them names the victim; with kernels over several
// nodes also that one says where the network failed.
void expect_victim_named(const DeathRank* self);
// Notes what the text of this survivor says, for that.
void note_text(const DeathRank* self, const char* text);

void expect_context_usable(const DeathRank* self);

// Opens a new communicator and group without the victim and checks that nothing of the failure is left.
void go_on_without_victim(DeathRank* self);
// Aborts the first communicator and continues without the victim.
void abort_and_go_on(DeathRank* self);
