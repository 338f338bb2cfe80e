// See stages.h.
#include "suites/transport/stages.h"

#include "forked/survivors.h"
#include "suites/transport/probe.h"

enum { kMostStages = 64 };

// Of this process, which runs one case.
static struct {
    const char* name;
    double time;
} g_stages[kMostStages];
static unsigned g_num_stages = 0;

void stage(const char* name) {
    if (g_num_stages == kMostStages) return;
    g_stages[g_num_stages].name = name;
    g_stages[g_num_stages++].time = seconds_now();
}

void print_stages(const DeathRank* self, double since) {
    fprintf(stderr, "rank %d: seconds since the wait began, of %u ms:\n", self->env.rank, self->timeout_ms);
    for (unsigned i = 0; i < g_num_stages; ++i) {
        fprintf(stderr, "  %+9.3f %s\n", g_stages[i].time - since, g_stages[i].name);
    }
    fprintf(stderr, "  %+9.3f now; last error: %s\n", seconds_now() - since, epProbeText());
}

void check_stage_in_time(const DeathRank* self, double since) {
    const uint64_t failed_before = ep_failed();
    check_in_time(self, since);
    if (ep_failed() != failed_before) print_stages(self, since);
}
