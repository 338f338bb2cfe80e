// A rank's end of a transport; see transport.h.
#include "reference/buffer.h"
#include "suites/transport/transport.h"

bool is_member(const size_t* ranks, size_t count, int rank) {
    for (size_t i = 0; i < count; ++i) {
        if (ranks[i] == (size_t)rank) return true;
    }
    return false;
}

enum { kMostBytes = 300000 };

// Some are few, one kind is none.
static size_t of_any_size(size_t from, size_t to, unsigned op) {
    static const size_t kBytes[] = {8, 1, 4096, 0, 70001, kMostBytes};
    return kBytes[ep_mix(from, to, op) % 6];
}

static const Sizes kAnySize = {kMostBytes, kOpsInFlight, of_any_size};

static void fill(unsigned char* data, size_t from, size_t to, unsigned op, size_t bytes) {
    for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
        const uint64_t word = ep_mix(from * 64 + to, op, i);
        memcpy(data + i, &word, bytes - i < sizeof(word) ? bytes - i : sizeof(word));
    }
}

int open_way(Way* way, const DeathRank* self, const EpEnv* env) { return open_way_of(way, self, env, &kAnySize); }

int open_way_of(Way* way, const DeathRank* self, const EpEnv* env, const Sizes* sizes) {
    memset(way, 0, sizeof(*way));
    way->sizes = sizes;
    way->self = self;
    way->env = env;
    const int result = epProbeRailOpen(&way->rail, env->comm, getenv("NCCL_HOSTID"), self->timeout_ms, env->stream);
    if (result != 0) return result;
    way->num_rail_peers = epProbeRailPeers(way->rail, way->rail_peers, kMaxRanks);
    way->num_forwarded = epProbeRailForwarded(way->rail, way->forwarded, kMaxRanks);
    for (unsigned i = 0; i < way->sizes->ops; ++i) {
        way->sent[i] = ep_device_alloc(way->num_rail_peers * way->sizes->most);
        way->received[i] = ep_device_alloc(way->num_forwarded * way->sizes->most);
    }
    return 0;
}

void close_way(Way* way) {
    epProbeRailClose(way->rail);
    for (unsigned i = 0; i < way->sizes->ops; ++i) {
        ep_device_free(way->sent[i]);
        ep_device_free(way->received[i]);
    }
}

void prepare(Way* way, unsigned op) {
    const size_t rank = (size_t)way->env->rank;
    EP_SCOPED unsigned char* host = ref_host_new(way->num_rail_peers * way->sizes->most);
    for (size_t i = 0; i < way->num_rail_peers; ++i) {
        fill(host + i * way->sizes->most, rank, way->rail_peers[i], op, way->sizes->most);
    }
    ep_upload(way->sent[op % way->sizes->ops], host, way->num_rail_peers * way->sizes->most);
    EP_CHECK_CUDA(cudaMemset(way->received[op % way->sizes->ops], 0xee, way->num_forwarded * way->sizes->most));
    EP_CHECK_CUDA(cudaStreamSynchronize(NULL));
}

int enqueue(Way* way, unsigned op, cudaStream_t stream) {
    const size_t rank = (size_t)way->env->rank;
    unsigned char* sent = way->sent[op % way->sizes->ops];
    unsigned char* received = way->received[op % way->sizes->ops];
    EpProbeMessage sends[kMaxRanks];
    EpProbeMessage receives[kMaxRanks];
    size_t num_receives = 0;
    for (size_t i = 0; i < way->num_rail_peers; ++i) {
        const EpProbeMessage message = {way->rail_peers[i], sent + i * way->sizes->most,
                                        way->sizes->of(rank, way->rail_peers[i], op)};
        sends[i] = message;
    }
    for (size_t i = 0; i < way->num_forwarded; ++i) {
        if (way->forwarded[i] == rank) continue;
        const EpProbeMessage message = {way->forwarded[i], received + i * way->sizes->most,
                                        way->sizes->of(way->forwarded[i], rank, op)};
        receives[num_receives++] = message;
    }
    return epProbeRailExchange(way->rail, sends, way->num_rail_peers, receives, num_receives, stream);
}

void check_received(Way* way, unsigned op) {
    const size_t rank = (size_t)way->env->rank;
    const size_t total = way->num_forwarded * way->sizes->most;
    EP_SCOPED unsigned char* got = ref_host_new(total);
    EP_SCOPED unsigned char* expected = ref_host_new(total);
    memset(expected, 0xee, total);
    for (size_t i = 0; i < way->num_forwarded; ++i) {
        const size_t source = way->forwarded[i];
        if (source != rank) {
            fill(expected + i * way->sizes->most, source, rank, op, way->sizes->of(source, rank, op));
        }
    }
    ep_download(got, way->received[op % way->sizes->ops], total);
    EP_CHECK_EQ_BYTES(got, expected, total);
}

void exchange_rounds(Way* way, unsigned rounds, cudaStream_t stream) {
    for (unsigned round = 0; round < rounds; ++round) {
        const unsigned first = round * way->sizes->ops;
        for (unsigned op = first; op < first + way->sizes->ops; ++op) prepare(way, op);
        for (unsigned op = first; op < first + way->sizes->ops; ++op) {
            EP_CHECK_EQ_I64(enqueue(way, op, stream), 0);
        }
        EP_CHECK_CUDA(cudaStreamSynchronize(stream));
        for (unsigned op = first; op < first + way->sizes->ops; ++op) check_received(way, op);
    }
    EP_CHECK_EQ_I64(epProbeRailHealth(way->rail), 0);
}

// ---- Stages

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
    g_stages[g_num_stages++].time = ep_seconds();
}

void print_stages(const DeathRank* self, double since) {
    fprintf(stderr, "rank %d: seconds since the wait began, of %u ms:\n", self->env.rank, self->timeout_ms);
    for (unsigned i = 0; i < g_num_stages; ++i) {
        fprintf(stderr, "  %+9.3f %s\n", g_stages[i].time - since, g_stages[i].name);
    }
    fprintf(stderr, "  %+9.3f now; last error: %s\n", ep_seconds() - since, epProbeText());
}

void check_stage_in_time(const DeathRank* self, double since) {
    const uint64_t failed_before = ep_failed();
    check_in_time(self, since);
    if (ep_failed() != failed_before) print_stages(self, since);
}
