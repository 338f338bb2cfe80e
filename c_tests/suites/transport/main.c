// The transport between nodes alone: what arrives, on equal and unequal nodes; and what the others see of a
// rank that dies, stops, or refuses.
//
//   test_transport [--ranks N] [--seed N] [--times N] [WORD]
//       runs the cases whose name contains WORD on N ranks (4); --times: how often to lose a rank in the
//       creation, at another time each (on the stand-ins once, on GPUs twice)
//
// It starts its own processes: do not start it with mpirun on more than one rank. Each case with messages runs
// in every split of the ranks over nodes, which NCCL is told by NCCL_HOSTID.
#define _GNU_SOURCE  // setenv, usleep
#include <signal.h>
#include <unistd.h>

#include "suites/transport/transport.h"

enum { kDefaultTimeoutMs = 1000, kDefaultRanks = 4, kSlackMs = 1000, kPollUs = 500, kRounds = 5 };

// ---- Everybody lives ---------------------------------------------------------------------------

DEATH_CASE(messages_arrive, kVictimLives) {
    Way way;
    EP_REQUIRE(open_way(&way, self, &self->env) == 0);
    EP_CHECK(is_member(way.forwarded, way.num_forwarded, self->env.rank));
    exchange_rounds(&way, kRounds, self->env.stream);
    EP_CHECK_EQ_I64(epProbeRailFaults(way.rail), 0);
    const double start = ep_seconds();
    close_way(&way);
    check_stage_in_time(self, start);
    EP_CHECK_NCCL(ncclCommDestroy(self->env.comm));
}

// More than the bytes from which on two ranks exchange in another way (src/backend/nccl/own.rs).
enum { kLargeBytes = (3 << 20) + 4100, kSmallBytes = 100, kMixes = 4 };

static size_t large_or_small(size_t from, size_t to, unsigned mix) {
    (void)to;
    return mix >> (from % 2) & 1 ? kLargeBytes : kSmallBytes;
}

// All mixes of large and small messages between ranks with even and with odd numbers.
DEATH_CASE(large_messages_arrive, kVictimLives) {
    static const Sizes kSizes = {kLargeBytes, 1, large_or_small};
    Way way;
    EP_REQUIRE(open_way_of(&way, self, &self->env, &kSizes) == 0);
    exchange_rounds(&way, kMixes, self->env.stream);
    EP_CHECK_EQ_I64(epProbeRailFaults(way.rail), 0);
    close_way(&way);
    EP_CHECK_NCCL(ncclCommDestroy(self->env.comm));
}

// Two transports at once, one on a stream of its own, and one after them.
DEATH_CASE(transports_are_apart, kVictimLives) {
    Way ways[2];
    cudaStream_t stream;
    ep_open_streams(&stream, 1);
    EP_REQUIRE(open_way(&ways[0], self, &self->env) == 0);
    EP_REQUIRE(open_way(&ways[1], self, &self->env) == 0);
    exchange_rounds(&ways[1], 1, stream);
    exchange_rounds(&ways[0], 1, self->env.stream);
    close_way(&ways[0]);
    exchange_rounds(&ways[1], 1, stream);
    close_way(&ways[1]);
    EP_REQUIRE(open_way(&ways[0], self, &self->env) == 0);
    exchange_rounds(&ways[0], 1, stream);
    close_way(&ways[0]);
    ep_close_streams(&stream, 1);
    EP_CHECK_NCCL(ncclCommDestroy(self->env.comm));
}

// A transport that ends while its operations are on the stream lets them come to their end.
DEATH_CASE(the_end_waits_for_operations, kVictimLives) {
    Way way;
    EP_REQUIRE(open_way(&way, self, &self->env) == 0);
    exchange_rounds(&way, 1, self->env.stream);
    if (is_victim(self)) usleep(self->timeout_ms * 1000 / 3);
    for (unsigned op = 0; op < kOpsInFlight; ++op) EP_CHECK_EQ_I64(enqueue(&way, op, self->env.stream), 0);
    epProbeRailClose(way.rail);
    EP_CHECK_CUDA(cudaStreamSynchronize(self->env.stream));
    for (unsigned op = 0; op < kOpsInFlight; ++op) check_received(&way, op);
    for (unsigned i = 0; i < kOpsInFlight; ++i) {
        ep_device_free(way.sent[i]);
        ep_device_free(way.received[i]);
    }
    EP_CHECK_NCCL(ncclCommDestroy(self->env.comm));
}

// One rank gives no node: no rank gets a transport, the next time all do.
DEATH_CASE(a_refusal_is_told, kVictimLives) {
    EpProbeRail* rail = NULL;
    const EpEnv* env = &self->env;
    const char* node = is_victim(self) ? NULL : "somewhere";
    const int result = epProbeRailOpen(&rail, env->comm, node, self->timeout_ms, env->stream);
    EP_CHECK_EQ_I64(result, is_victim(self) ? ncclInvalidArgument : ncclRemoteError);
    EP_CHECK(rail == NULL);
    EP_CHECK(is_victim(self) || names(epProbeText(), self->victim));
    // One rank's environment fixes the id of communicators.
    Way way;
    if (is_victim(self)) EP_REQUIRE(setenv("NCCL_COMM_ID", "127.0.0.1:40000", 1) == 0);
    const int expected = is_victim(self) ? ncclInvalidUsage : ncclRemoteError;
    EP_CHECK_EQ_I64(open_way(&way, self, env), expected);
    EP_CHECK_STR_CONTAINS(epProbeText(), "OwnIdsForNetwork");
    EP_CHECK(is_victim(self) || names(epProbeText(), self->victim));
    EP_REQUIRE(unsetenv("NCCL_COMM_ID") == 0);
    messages_arrive(self);
}

// ---- The program -------------------------------------------------------------------------------

// Decides when.
static uint64_t g_random;

static void lose_in_the_creation(SharedState* shared, int num_ranks, pid_t victim, int by) {
    // About as long as a creation takes.
    const uint64_t longest_us = ep_on_hostsim() ? 6000 : 800000;
    while (atomic_load(&shared->arrived[kReady]) < num_ranks) usleep(kPollUs);
    usleep((unsigned)ep_random_below(&g_random, longest_us));
    kill(victim, by);
    atomic_store(&shared->lost, ep_seconds());
}

// A case in which the parent sends this signal.
#define CASE_IN_THE_CREATION(name, end, by)                                           \
    static void send_##by(SharedState* shared, int num_ranks, pid_t victim) {         \
        lose_in_the_creation(shared, num_ranks, victim, by);                          \
    }                                                                                 \
    DISTURBED_CASE(name, end, send_##by) { a_rank_is_lost_in_the_creation(self); }
CASE_IN_THE_CREATION(a_rank_is_killed_in_the_creation, kVictimDies, SIGKILL)
CASE_IN_THE_CREATION(a_rank_stops_in_the_creation, kVictimStops, SIGSTOP)

// How the ranks of a case are dealt over nodes.
static const char* const kSplits[] = {"halves", "interleaved", "apart", "one_alone", "one_first"};
enum { kNumSplits = COUNT(kSplits) };

static int node_of(unsigned split, int rank, int ranks) {
    const int nodes[kNumSplits] = {rank >= (ranks + 1) / 2, rank % 2, rank, rank == ranks - 1, rank > 0};
    return nodes[split];
}

static void run_in_splits(const DeathCase* test, DeathSetting setting, unsigned losses) {
    const unsigned times = strstr(test->name, "_in_the_creation") != NULL ? losses : 1;
    char nodes[kNumSplits][kMaxRanks + 1] = {{0}};
    for (unsigned i = 0; i < kNumSplits; ++i) {
        for (int rank = 0; rank < setting.num_ranks; ++rank) {
            nodes[i][rank] = (char)('A' + node_of(i, rank, setting.num_ranks));
        }
        // Few ranks are dealt alike in several splits.
        unsigned first = 0;
        while (strcmp(nodes[first], nodes[i]) != 0) ++first;
        if (first < i) continue;
        setting.split = nodes[i];
        const uint64_t failed_before = ep_failed();
        for (unsigned time = 0; time < times; ++time) run_death_case(test, setting);
        char name[64];
        snprintf(name, sizeof(name), "%-36s %s", test->name, kSplits[i]);
        print_outcome(name, failed_before);
    }
}

int main(int argc, char** argv) {
    unsigned num_ranks = kDefaultRanks;
    unsigned seed = 5;
    unsigned losses = ep_on_hostsim() ? 1 : 2;
    const char* word = "";
    const EpOption table[] = {{"--ranks", &num_ranks, NULL}, {"--seed", &seed, NULL}, {"--times", &losses, NULL}};
    if (!ep_read_options(argc, argv, table, 3, &word) || num_ranks < 2 || num_ranks > kMaxRanks) {
        fprintf(stderr, "usage: test_transport [--ranks 2..%d] [--seed N] [--times N] [WORD]\n", kMaxRanks);
        return 2;
    }
    // All ranks are on one machine, unless somebody says otherwise.
    EP_REQUIRE(setenv("NCCL_SOCKET_IFNAME", "lo", 0) == 0);
    EP_REQUIRE(setenv("NCCL_IB_DISABLE", "1", 0) == 0);
    g_random = seed;
    const DeathSetting setting = {(int)num_ranks, (int)num_ranks - 1,
                                  timeout_from_environment(kDefaultTimeoutMs), kSlackMs, ""};
    for (const DeathCase* test = death_cases(); test != NULL; test = test->next) {
        // The CPU backend captures nothing.
        if (strstr(test->name, "_replay") != NULL && ep_on_host_backend()) continue;
        if (strstr(test->name, word) != NULL) run_in_splits(test, setting, losses);
    }
    return end_program();
}
