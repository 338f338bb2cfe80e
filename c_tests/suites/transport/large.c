// See large.h.
#include "suites/transport/large.h"

#include <stdlib.h>
#include <string.h>

#include "suites/transport/way.h"

// More than the bytes from which on there is another way (src/backend/nccl/own.rs).
enum { kLargeBytes = (3 << 20) + 4100, kSmallBytes = 100, kMixes = 4 };

static size_t bytes_of(size_t from, unsigned mix) {
    return mix >> (from % 2) & 1 ? kLargeBytes : kSmallBytes;
}

// A pattern that shows from whom it is, to whom, and when.
static void fill(unsigned char* data, size_t from, size_t to, unsigned mix) {
    const size_t first = 1 + from + 16 * to + 64 * mix;
    for (size_t i = 0; i < bytes_of(from, mix); ++i) data[i] = (unsigned char)(first + i + i / 251);
}

// For each rail peer or forwarded rank a place of kLargeBytes, which begins with the message.
static unsigned char* expected(const Way* way, bool sends, unsigned mix) {
    const size_t self = (size_t)way->env->rank;
    const size_t count = sends ? way->num_rail_peers : way->num_forwarded;
    const size_t* ranks = sends ? way->rail_peers : way->forwarded;
    unsigned char* data = malloc(count * kLargeBytes);
    EP_REQUIRE(data != NULL);
    memset(data, 0xee, count * kLargeBytes);
    for (size_t i = 0; i < count; ++i) {
        unsigned char* place = data + i * kLargeBytes;
        if (sends) {
            fill(place, self, ranks[i], mix);
        } else if (ranks[i] != self) {
            fill(place, ranks[i], self, mix);
        }
    }
    return data;
}

static void exchange(const Way* way, unsigned mix, unsigned char* sent, unsigned char* received) {
    const size_t self = (size_t)way->env->rank;
    EpProbeMessage sends[kMaxRanks];
    EpProbeMessage receives[kMaxRanks];
    size_t num_receives = 0;
    for (size_t i = 0; i < way->num_rail_peers; ++i) {
        const EpProbeMessage message = {way->rail_peers[i], sent + i * kLargeBytes,
                                        bytes_of(self, mix)};
        sends[i] = message;
    }
    for (size_t i = 0; i < way->num_forwarded; ++i) {
        const size_t source = way->forwarded[i];
        if (source == self) continue;
        const EpProbeMessage message = {source, received + i * kLargeBytes, bytes_of(source, mix)};
        receives[num_receives++] = message;
    }
    EP_CHECK_EQ_I64(epProbeRailExchange(way->rail, sends, way->num_rail_peers, receives,
                                        num_receives, way->env->stream),
                    0);
}

static void check_mix(const Way* way, unsigned mix) {
    const size_t bytes_sent = way->num_rail_peers * kLargeBytes;
    const size_t bytes_received = way->num_forwarded * kLargeBytes;
    unsigned char* out = expected(way, true, mix);
    unsigned char* in = expected(way, false, mix);
    unsigned char* got = malloc(bytes_received);
    EP_REQUIRE(got != NULL);
    void* sent = ep_device_upload(out, bytes_sent);
    void* received = ep_device_alloc(bytes_received);
    EP_CHECK_CUDA(cudaMemset(received, 0xee, bytes_received));
    EP_CHECK_CUDA(cudaStreamSynchronize(NULL));
    exchange(way, mix, sent, received);
    EP_CHECK_CUDA(cudaStreamSynchronize(way->env->stream));
    ep_download(got, received, bytes_received);
    EP_CHECK_EQ_BYTES(got, in, bytes_received);
    ep_device_free(sent);
    ep_device_free(received);
    free(out);
    free(in);
    free(got);
}

void large_messages_arrive(DeathRank* self) {
    Way way;
    EP_REQUIRE(open_way(&way, self, &self->env) == 0);
    for (unsigned mix = 0; mix < kMixes; ++mix) check_mix(&way, mix);
    EP_CHECK_EQ_I64(epProbeRailFaults(way.rail), 0);
    close_way(&way);
    EP_CHECK_NCCL(ncclCommDestroy(self->env.comm));
}
