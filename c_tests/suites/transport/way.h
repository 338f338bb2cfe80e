// One rank's end of a transport between nodes, and messages over it whose contents every rank can compute.
#pragma once

#include "forked/ranks.h"
#include "suites/transport/probe.h"

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
