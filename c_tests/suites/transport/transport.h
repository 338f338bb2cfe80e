// The parts of test_transport: the transport, a rank's end of it, and what the others see of a rank that is lost.
#pragma once

#include "forked/survivors.h"

// ---- Functions of libnccl_ep_probe.so (abi/probe) that open a transport between nodes alone

typedef struct EpProbeRail EpProbeRail;

typedef struct {
    size_t peer;
    void* data;
    size_t bytes;
} EpProbeMessage;

// 0, or the number of NCCL's result. Ranks with the same `node` are on one.
int epProbeRailOpen(EpProbeRail** rail, ncclComm_t comm, const char* node, unsigned timeout_ms, cudaStream_t stream);
void epProbeRailClose(EpProbeRail* rail);
// Writes at most `most` ranks; gives how many there are.
size_t epProbeRailPeers(const EpProbeRail* rail, size_t* ranks, size_t most);
size_t epProbeRailForwarded(const EpProbeRail* rail, size_t* ranks, size_t most);
int epProbeRailExchange(const EpProbeRail* rail, const EpProbeMessage* sends, size_t num_sends,
                        const EpProbeMessage* receives, size_t num_receives, cudaStream_t stream);
int epProbeRailHealth(const EpProbeRail* rail);
int epProbeRailFaults(const EpProbeRail* rail);  // how often it told of a failure
void epProbeRailAbort(const EpProbeRail* rail);
const char* epProbeText(void);

// ---- way.c: one rank's end, and messages over it whose contents every rank can compute

enum { kOpsInFlight = 6 };

// How many bytes messages have, and how many operations are in flight.
typedef struct {
    size_t most;
    unsigned ops;  // at most kOpsInFlight
    size_t (*of)(size_t from, size_t to, unsigned op);
} Sizes;

typedef struct {
    const DeathRank* self;
    const EpEnv* env;  // its ranks and communicator
    EpProbeRail* rail;
    const Sizes* sizes;
    size_t rail_peers[kMaxRanks];
    size_t num_rail_peers;
    size_t forwarded[kMaxRanks];
    size_t num_forwarded;
    // Of each operation in flight: what this rank sends to each rail peer, and what comes from each source.
    unsigned char* sent[kOpsInFlight];
    unsigned char* received[kOpsInFlight];
} Way;

// Whether `rank` is one of the ranks.
bool is_member(const size_t* ranks, size_t count, int rank);

// Opens a transport over the communicator of `env` for a rank on the node NCCL_HOSTID; 0, or the
// number of NCCL's result.
int open_way(Way* way, const DeathRank* self, const EpEnv* env);
int open_way_of(Way* way, const DeathRank* self, const EpEnv* env, const Sizes* sizes);
void close_way(Way* way);

// Enqueues operation `op`, an exchange.
int enqueue(Way* way, unsigned op, cudaStream_t stream);
// Fills what operation `op` sends, and marks what it is to receive.
void prepare(Way* way, unsigned op);
// Compares what it received; the stream has run it.
void check_received(Way* way, unsigned op);
// A few operations in flight, compared.
void exchange_rounds(Way* way, unsigned rounds, cudaStream_t stream);

// When a rank came to which stage of a case; a check that fails for time prints them.
// `name` stays valid.
void stage(const char* name);

// As check_in_time. A failure prints all stages, and the last error of the transport.
void check_stage_in_time(const DeathRank* self, double since);
// Prints the stages, in seconds since `since`, and the last error of the transport.
void print_stages(const DeathRank* self, double since);

// ---- losses.c: what the others see of a rank that dies, stops, or gives up

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
