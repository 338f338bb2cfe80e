// What the others see of a rank that dies, stops, or gives up.
#pragma once

#include "suites/transport/way.h"

// Stops this process until the parent kills it.
void stop_for_good(DeathRank* self);
// Whether this rank sends to the victim or receives from it.
bool talks_to_victim(const DeathRank* self, const Way* way);
// Waits for the failure, which must name who waited and the victim.
void expect_failure(DeathRank* self, Way* way, double start);
// Waits until what was on the stream has come to its end, at most until the deadline since `start`.
void expect_end_of_stream(const DeathRank* self, double start);
// Opens a communicator and a transport without the victim.
void go_on(DeathRank* self);

void a_rank_is_lost_in_the_creation(DeathRank* self);
