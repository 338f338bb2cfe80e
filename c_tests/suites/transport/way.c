// See way.h.
#define _GNU_SOURCE  // setenv
#include "suites/transport/way.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int halves(int rank, int ranks) { return rank < (ranks + 1) / 2 ? 0 : 1; }
static int interleaved(int rank, int ranks) { return ranks > 1 ? rank % 2 : 0; }
static int apart(int rank, int ranks) { return ranks > 1 ? rank : 0; }
static int one_alone(int rank, int ranks) { return rank == ranks - 1 ? 1 : 0; }
static int one_first(int rank, int ranks) { return ranks > 1 && rank > 0 ? 1 : 0; }

bool is_member(const size_t* ranks, size_t count, int rank) {
    for (size_t i = 0; i < count; ++i) {
        if (ranks[i] == (size_t)rank) return true;
    }
    return false;
}

const Split kSplits[] = {{"halves", halves},
                         {"interleaved", interleaved},
                         {"apart", apart},
                         {"one_alone", one_alone},
                         {"one_first", one_first}};
const unsigned kNumSplits = sizeof(kSplits) / sizeof(kSplits[0]);

const Split* split_of_process(void) {
    const char* name = getenv("EP_TEST_SPLIT");
    for (unsigned i = 0; i < kNumSplits; ++i) {
        if (name != NULL && strcmp(kSplits[i].name, name) == 0) return &kSplits[i];
    }
    return &kSplits[0];
}

static void node_name(char* name, size_t size, int rank, int ranks) {
    snprintf(name, size, "node-%d", split_of_process()->node_of(rank, ranks));
}

void claim_node(DeathRank* self) {
    char name[32];
    node_name(name, sizeof(name), self->env.rank, self->env.size);
    EP_REQUIRE(setenv("NCCL_HOSTID", name, 1) == 0);
    // All are on one machine, unless somebody says otherwise.
    EP_REQUIRE(setenv("NCCL_SOCKET_IFNAME", "lo", 0) == 0);
    EP_REQUIRE(setenv("NCCL_IB_DISABLE", "1", 0) == 0);
}

// Bytes of a message; some are few, one kind is none.
static size_t bytes_of(size_t from, size_t to, unsigned op) {
    static const size_t kSizes[] = {8, 1, 4096, 0, 70001, kMostBytes};
    return kSizes[ep_mix(from, to, op) % 6];
}

// Whole words: a number for each byte would take most of a program's time.
static void fill(unsigned char* data, size_t from, size_t to, unsigned op, size_t bytes) {
    for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
        const uint64_t word = ep_mix(from * 64 + to, op, i / sizeof(word));
        memcpy(data + i, &word, bytes - i < sizeof(word) ? bytes - i : sizeof(word));
    }
}

int open_way(Way* way, const DeathRank* self, const EpEnv* env) {
    char name[32];
    memset(way, 0, sizeof(*way));
    way->self = self;
    way->env = env;
    node_name(name, sizeof(name), self->env.rank, self->env.size);
    const int result =
        epProbeRailOpen(&way->rail, env->comm, name, self->timeout_ms, env->stream);
    if (result != 0) return result;
    way->num_rail_peers = epProbeRailPeers(way->rail, way->rail_peers, kMaxRanks);
    way->num_forwarded = epProbeRailForwarded(way->rail, way->forwarded, kMaxRanks);
    for (unsigned i = 0; i < kOpsInFlight; ++i) {
        way->sent[i] = ep_device_alloc(way->num_rail_peers * kMostBytes);
        way->received[i] = ep_device_alloc(way->num_forwarded * kMostBytes);
    }
    return 0;
}

void close_way(Way* way) {
    epProbeRailClose(way->rail);
    for (unsigned i = 0; i < kOpsInFlight; ++i) {
        ep_device_free(way->sent[i]);
        ep_device_free(way->received[i]);
    }
}

void prepare(Way* way, unsigned op) {
    const size_t rank = (size_t)way->env->rank;
    unsigned char* host = calloc(way->num_rail_peers, kMostBytes);
    EP_REQUIRE(host != NULL);
    for (size_t i = 0; i < way->num_rail_peers; ++i) {
        fill(host + i * kMostBytes, rank, way->rail_peers[i], op, kMostBytes);
    }
    ep_upload(way->sent[op % kOpsInFlight], host, way->num_rail_peers * kMostBytes);
    free(host);
    EP_CHECK_CUDA(cudaMemset(way->received[op % kOpsInFlight], 0xee,
                             way->num_forwarded * kMostBytes));
    EP_CHECK_CUDA(cudaStreamSynchronize(NULL));
}

int enqueue(Way* way, unsigned op, cudaStream_t stream) {
    const size_t rank = (size_t)way->env->rank;
    unsigned char* sent = way->sent[op % kOpsInFlight];
    unsigned char* received = way->received[op % kOpsInFlight];
    EpProbeMessage sends[kMaxRanks];
    EpProbeMessage receives[kMaxRanks];
    size_t num_receives = 0;
    for (size_t i = 0; i < way->num_rail_peers; ++i) {
        const EpProbeMessage message = {way->rail_peers[i], sent + i * kMostBytes,
                                        bytes_of(rank, way->rail_peers[i], op)};
        sends[i] = message;
    }
    for (size_t i = 0; i < way->num_forwarded; ++i) {
        if (way->forwarded[i] == rank) continue;
        const EpProbeMessage message = {way->forwarded[i], received + i * kMostBytes,
                                        bytes_of(way->forwarded[i], rank, op)};
        receives[num_receives++] = message;
    }
    return epProbeRailExchange(way->rail, sends, way->num_rail_peers, receives, num_receives, stream);
}

void check_received(Way* way, unsigned op) {
    const size_t rank = (size_t)way->env->rank;
    const size_t total = way->num_forwarded * kMostBytes;
    unsigned char* got = malloc(total);
    unsigned char* expected = malloc(total);
    EP_REQUIRE(got != NULL && expected != NULL);
    memset(expected, 0xee, total);
    for (size_t i = 0; i < way->num_forwarded; ++i) {
        const size_t source = way->forwarded[i];
        if (source != rank) {
            fill(expected + i * kMostBytes, source, rank, op, bytes_of(source, rank, op));
        }
    }
    ep_download(got, way->received[op % kOpsInFlight], total);
    EP_CHECK_EQ_BYTES(got, expected, total);
    free(got);
    free(expected);
}

void exchange_rounds(Way* way, unsigned rounds, cudaStream_t stream) {
    for (unsigned round = 0; round < rounds; ++round) {
        const unsigned first = round * kOpsInFlight;
        for (unsigned op = first; op < first + kOpsInFlight; ++op) prepare(way, op);
        for (unsigned op = first; op < first + kOpsInFlight; ++op) {
            EP_CHECK_EQ_I64(enqueue(way, op, stream), 0);
        }
        EP_CHECK_CUDA(cudaStreamSynchronize(stream));
        for (unsigned op = first; op < first + kOpsInFlight; ++op) check_received(way, op);
    }
    EP_CHECK_EQ_I64(epProbeRailHealth(way->rail), 0);
}
