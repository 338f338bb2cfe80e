// Ranks that are lost; see transport.h.
#define _GNU_SOURCE  // usleep
#include "suites/transport/transport.h"

#include <signal.h>
#include <unistd.h>

enum { kPollUs = 500 };

bool talks_to_victim(const DeathRank* self, const Way* way) {
    return is_member(way->rail_peers, way->num_rail_peers, self->victim) ||
           is_member(way->forwarded, way->num_forwarded, self->victim);
}

// Whether a thread of the library may still be inside NCCL with the communicator.
static bool is_connecting(void) { return strstr(epProbeText(), "which NCCL is still connecting") != NULL; }

void go_on(DeathRank* self) {
    const double start = ep_seconds();
    stage("ends the first communicator");
    // NCCL must not free it below that thread, so it stays.
    if (!is_connecting()) EP_CHECK_NCCL(ncclCommAbort(self->env.comm));
    // What was ended may have left its error on the stream.
    (void)cudaStreamSynchronize(self->env.stream);
    (void)cudaGetLastError();
    expect_context_usable(self);
    stage("makes the second communicator");
    EpEnv env = self->env;
    env.size = survivors(self);
    if (env.rank > self->victim) --env.rank;
    env.comm = open_comm(self, kSecondId, env.rank, env.size);
    Way way;
    stage("opens the second transport");
    EP_REQUIRE(open_way(&way, self, &env) == 0);
    exchange_rounds(&way, 1, env.stream);
    close_way(&way);
    stage("ends the second communicator");
    EP_CHECK_NCCL(ncclCommDestroy(env.comm));
    // NCCL promises no time, but it is of interest.
    if (!in_time(self, start)) print_stages(self, start);
}

void expect_failure(DeathRank* self, Way* way, double start) {
    int health = 0;
    while ((health = epProbeRailHealth(way->rail)) == 0 && in_time(self, start)) usleep(kPollUs);
    const bool deadline = strstr(epProbeText(), "deadline passed: ") != NULL;
    EP_CHECK(health != 0);
    check_stage_in_time(self, start);
    // Another thread may be about to tell.
    while (epProbeRailFaults(way->rail) == 0 && in_time(self, start)) usleep(kPollUs);
    EP_CHECK_EQ_I64(epProbeRailFaults(way->rail), 1);
    char own[48];
    snprintf(own, sizeof(own), "rank %d of node ", self->env.rank);
    EP_CHECK_STR_CONTAINS(epProbeText(), own);
    EP_CHECK_STR_CONTAINS(epProbeText(), "network operation ");
    EP_CHECK_STR_CONTAINS(epProbeText(), ", probe 16");
    EP_CHECK(names(epProbeText(), self->victim));
    if (deadline) EP_CHECK_EQ_I64(health, ncclRemoteError);
    EP_CHECK(enqueue(way, 0, self->env.stream) == health);
}

void expect_end_of_stream(const DeathRank* self, double start) {
    stage("waits for the stream");
    while (cudaStreamQuery(self->env.stream) == cudaErrorNotReady && in_time(self, start)) usleep(kPollUs);
    EP_CHECK(cudaStreamQuery(self->env.stream) != cudaErrorNotReady);
    check_stage_in_time(self, start);
    (void)cudaStreamSynchronize(self->env.stream);
    (void)cudaGetLastError();
}

// Operations of all that are left. Who waits for the victim sees it; the others may see that somebody gave up.
static void meet_the_loss(DeathRank* self, Way* way) {
    const double start = ep_seconds();
    stage("enqueues");
    for (unsigned op = 0; op < kOpsInFlight; ++op) (void)enqueue(way, op, self->env.stream);
    stage("waits for the failure");
    if (talks_to_victim(self, way)) expect_failure(self, way, start);
    expect_end_of_stream(self, start);
    const double closing = ep_seconds();
    stage("closes");
    close_way(way);
    stage("has closed");
    check_stage_in_time(self, closing);
    meet(self, kNoticed, survivors(self));
    go_on(self);
}

DEATH_CASE(a_rank_is_killed, kVictimDies) {
    Way way;
    EP_REQUIRE(open_way(&way, self, &self->env) == 0);
    exchange_rounds(&way, 1, self->env.stream);
    lose_victim(self);
    meet_the_loss(self, &way);
}

void stop_for_good(DeathRank* self) {
    self->shared->passed[self->env.rank] = ep_passed() - self->passed_before;
    self->shared->failed[self->env.rank] = ep_failed() - self->failed_before;
    atomic_store(&self->shared->lost, ep_seconds());
    raise(SIGSTOP);
}

// Nobody tells the others; their deadline does.
DEATH_CASE(a_rank_stops, kVictimStops) {
    Way way;
    EP_REQUIRE(open_way(&way, self, &self->env) == 0);
    exchange_rounds(&way, 1, self->env.stream);
    meet(self, kReady, self->env.size);
    if (is_victim(self)) stop_for_good(self);
    wait_for_loss(self);
    meet_the_loss(self, &way);
}

// The victim never comes to a creation, in which no rank gets a transport.
static void expect_no_transport(DeathRank* self) {
    wait_for_loss(self);
    Way way;
    const double start = ep_seconds();
    stage("opens a transport");
    const int result = open_way(&way, self, &self->env);
    stage("has none");
    check_stage_in_time(self, start);
    // Or an error of NCCL, where it notices a death at once.
    const bool has_waited = strstr(epProbeText(), " waited ") != NULL;
    EP_CHECK(result != 0 && (!has_waited || result == ncclRemoteError));
    EP_CHECK(has_waited || strstr(epProbeText(), "NCCL error ") != NULL);
    meet(self, kNoticed, survivors(self));
    go_on(self);
}

// NCCL connects the ranks in the first operation of the communicator, and tries for long.
DEATH_CASE(a_rank_dies_before_the_creation, kVictimDies) {
    meet(self, kReady, self->env.size);
    if (is_victim(self)) die(self);
    expect_no_transport(self);
}

DEATH_CASE(a_rank_stops_before_the_creation, kVictimStops) {
    Way way;
    EP_REQUIRE(open_way(&way, self, &self->env) == 0);
    close_way(&way);
    meet(self, kReady, self->env.size);
    if (is_victim(self)) stop_for_good(self);
    expect_no_transport(self);
}

// The victim is stopped or killed somewhere in the creation. Whoever gets a transport all the same finds out by
// its first operation, if that needs the victim.
void a_rank_is_lost_in_the_creation(DeathRank* self) {
    Way way;
    meet(self, kReady, self->env.size);
    double start = ep_seconds();
    stage("opens a transport");
    const int result = open_way(&way, self, &self->env);
    stage(result == 0 ? "has a transport" : "has none");
    if (is_victim(self)) {
        for (;;) pause();
    }
    check_stage_in_time(self, start);
    if (result == 0) {
        wait_for_loss(self);
        start = ep_seconds();
        stage("enqueues");
        (void)enqueue(&way, 1, self->env.stream);
        expect_end_of_stream(self, start);
        start = ep_seconds();
        stage("closes");
        close_way(&way);
        check_stage_in_time(self, start);
    }
    meet(self, kNoticed, survivors(self));
    go_on(self);
}

// A transport that was given up refuses, and ends what waits. One rank alone does so: others may see it.
DEATH_CASE(giving_up_ends_what_waits, kVictimLives) {
    Way way;
    EP_REQUIRE(open_way(&way, self, &self->env) == 0);
    exchange_rounds(&way, 1, self->env.stream);
    meet(self, kReady, self->env.size);
    const double start = ep_seconds();
    if (self->env.rank == 0 && talks_to_victim(self, &way)) {
        EP_CHECK_EQ_I64(enqueue(&way, 0, self->env.stream), 0);
        epProbeRailAbort(way.rail);
        EP_CHECK_EQ_I64(epProbeRailHealth(way.rail), ncclRemoteError);
        EP_CHECK_STR_CONTAINS(epProbeText(), " gave the network up");
        EP_CHECK_EQ_I64(epProbeRailFaults(way.rail), 0);
        EP_CHECK_EQ_I64(enqueue(&way, 1, self->env.stream), ncclRemoteError);
        (void)cudaStreamSynchronize(self->env.stream);
        (void)cudaGetLastError();
    }
    // Who closes its end before is a rank that is lost.
    meet(self, kNoticed, self->env.size);
    close_way(&way);
    check_stage_in_time(self, start);
    meet(self, kAllKnow, self->env.size);
    expect_context_usable(self);
    EP_CHECK_NCCL(ncclCommAbort(self->env.comm));
}
