// When a rank came to which stage of a case; a check that fails for time prints them.
#pragma once

#include "forked/ranks.h"

// Notes the time; `name` stays valid.
void stage(const char* name);

// As check_in_time. A failure prints all stages, and the last error of the transport.
void check_stage_in_time(const DeathRank* self, double since);
// Prints the stages, in seconds since `since`, and the last error of the transport.
void print_stages(const DeathRank* self, double since);
