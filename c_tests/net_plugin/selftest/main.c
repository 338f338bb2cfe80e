// Tests the network plugin without NCCL: `selftest libnccl-net-ep-test.so`.
#define _GNU_SOURCE  // setenv
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "net_plugin/log.h"
#include "net_plugin/selftest/peers.h"

enum { kMiB = 1 << 20, kBig = 20 * kMiB, kInFlight = 8, kPostedMost = 32 };

static const int kSizes[] = {0, 1, 100, kMiB, kBig};
enum { kNumSizes = sizeof(kSizes) / sizeof(kSizes[0]) };

// ---- What NCCL asks before it connects

static void table(Peer* self) {
    const NetTableV8* net = self->net;
    static const char* const others[] = {"ncclNetPlugin_v5", "ncclNetPlugin_v6",
                                         "ncclNetPlugin_v7", "ncclNetPlugin_v9",
                                         "ncclNetPlugin_v10", "ncclNetPlugin_v11"};
    for (unsigned i = 0; i < sizeof(others) / sizeof(others[0]); ++i) {
        CHECK(!library_has(others[i]));
    }
    CHECK(strcmp(net->name, NET_PLUGIN_NAME) == 0);
    CHECK(net->regMrDmaBuf == NULL && net->getDeviceMr == NULL && net->irecvConsumed == NULL);
    int devices = 0;
    CHECK(net->devices(&devices) == ncclSuccess && devices == 1);
    NetPropertiesV8 properties;
    memset(&properties, 0x5a, sizeof(properties));
    CHECK(net->getProperties(0, &properties) == ncclSuccess);
    CHECK(properties.name != NULL && properties.name[0] != '\0');
    CHECK(properties.pciPath == NULL && properties.guid == 0 && properties.port == 0);
    CHECK(properties.ptrSupport == kNetPointerHost && properties.regIsGlobal == 0);
    CHECK(properties.speed > 0 && properties.maxComms > 0 && properties.maxRecvs == 1);
    CHECK(properties.netDeviceType == kNetDeviceHost && properties.netDeviceVersion == 0);
    CHECK(net->getProperties(1, &properties) != ncclSuccess);
}

static void refusals(Peer* self) {
    Links links;
    if (!links_open(self, &links, 1)) return;
    void* registration = NULL;
    void* request = NULL;
    char byte = 0;
    void* data[2] = {&byte, &byte};
    int sizes[2] = {1, 1};
    int tags[2] = {0, 0};
    CHECK(self->net->regMr(links.send[0], &byte, 1, kNetPointerCuda, &registration) != ncclSuccess);
    CHECK(self->net->regMr(links.send[0], &byte, 1, kNetPointerHost, &registration) == ncclSuccess);
    CHECK(self->net->deregMr(links.send[0], registration) == ncclSuccess);
    CHECK(self->net->irecv(links.recv[0], 2, data, sizes, tags, data, &request) != ncclSuccess);
    CHECK(self->net->isend(links.send[0], &byte, -1, 0, NULL, &request) != ncclSuccess);
    CHECK(self->net->iflush(links.recv[0], 1, data, sizes, data, &request) != ncclSuccess);
    CHECK(self->net->closeSend(NULL) == ncclSuccess && self->net->closeRecv(NULL) == ncclSuccess);
    links_close(self, &links);
}

static void unknown_interface(Peer* self) {
    setenv("EP_TEST_NET_IFNAME", "no-such-one", 1);
    CHECK(self->net->init(NULL) != ncclSuccess);
    unsetenv("EP_TEST_NET_IFNAME");
    CHECK(self->net->init(NULL) == ncclSuccess);
}

// ---- Messages

// Every size in both directions, one after the other; then the log of this process.
static void sizes_both_ways(Peer* self) {
    Links links;
    if (!links_open(self, &links, 1)) return;
    unsigned char* out = malloc(kBig);
    unsigned char* in = malloc(kBig);
    unsigned refused = 0;
    unsigned long long total = 0;
    for (int i = 0; i < kNumSizes; ++i) {
        fill(out, (size_t)kSizes[i], (uint64_t)(10 * i + self->side));
        void* requests[2] = {post_recv(self, links.recv[0], in, kSizes[i], &refused),
                             post_send(self, links.send[0], out, kSizes[i], &refused)};
        int got[2] = {-1, -1};
        if (!CHECK(requests[0] != NULL && requests[1] != NULL)) break;
        CHECK(finish_all(self, requests, got, 2) == ncclSuccess);
        CHECK(got[0] == kSizes[i] && got[1] == kSizes[i]);
        CHECK(is_filled(in, (size_t)kSizes[i], (uint64_t)(10 * i + 1 - self->side)));
        total += (unsigned long long)kSizes[i];
    }
    CHECK(refused > 0);
    links_close(self, &links);
    NetLog log;
    CHECK(net_log_read(self->log, &log));
    CHECK(log.sent_bytes == total && log.sent_messages == kNumSizes);
    CHECK(log.received_bytes == total && log.received_messages == kNumSizes);
    CHECK(log.channels == 0 && log.other_channels == 0);
    free(out);
    free(in);
}

static int size_of_message(int link, int index) { return (link * 70001 + index * 9973) % 200003; }

// Several connections, each with several messages on the way; all have more room than is needed.
static void many_at_once(Peer* self) {
    enum { kRoom = 200003, kTotal = kMaxLinks * kInFlight };
    Links links;
    if (!links_open(self, &links, kMaxLinks)) return;
    unsigned char* out = malloc((size_t)kRoom * kTotal);
    unsigned char* in = malloc((size_t)kRoom * kTotal);
    void* requests[2 * kTotal];
    int got[2 * kTotal];
    unsigned refused = 0;
    for (int round = 0; round < 3; ++round) {
        for (int i = 0; i < kTotal; ++i) {
            const int link = i / kInFlight;
            const int bytes = size_of_message(link, i + round);
            unsigned char* from = out + (size_t)i * kRoom;
            fill(from, (size_t)bytes, (uint64_t)(i + 1000 * self->side + round));
            requests[i] =
                post_recv(self, links.recv[link], in + (size_t)i * kRoom, kRoom, &refused);
            requests[kTotal + i] = post_send(self, links.send[link], from, bytes, &refused);
            CHECK(requests[i] != NULL && requests[kTotal + i] != NULL);
        }
        CHECK(finish_all(self, requests, got, 2 * kTotal) == ncclSuccess);
        for (int i = 0; i < kTotal; ++i) {
            const int bytes = size_of_message(i / kInFlight, i + round);
            CHECK(got[i] == bytes && got[kTotal + i] == bytes);
            CHECK(is_filled(in + (size_t)i * kRoom, (size_t)bytes,
                            (uint64_t)(i + 1000 * (1 - self->side) + round)));
        }
    }
    CHECK(refused > 0);
    links_close(self, &links);
    free(out);
    free(in);
}

// No more requests than the plugin has; those that are done can be had again.
static void requests_run_out(Peer* self) {
    Links links;
    if (!links_open(self, &links, 1)) return;
    int values[kPostedMost + 1];
    void* requests[kPostedMost];
    int got[kPostedMost];
    unsigned refused = 0;
    void* comm = self->side == 0 ? links.send[0] : links.recv[0];
    for (int i = 0; i < kPostedMost; ++i) {
        values[i] = self->side == 0 ? i : -1;
        requests[i] = self->side == 0
                          ? post_send(self, comm, &values[i], sizeof(values[i]), &refused)
                          : post_recv(self, comm, &values[i], sizeof(values[i]), &refused);
    }
    void* none = NULL;
    for (int i = 0; i < 10 && self->side == 0; ++i) {
        CHECK(self->net->isend(comm, values, 4, 0, NULL, &none) == ncclSuccess && none == NULL);
    }
    CHECK(finish_all(self, requests, got, kPostedMost) == ncclSuccess);
    for (int i = 0; i < kPostedMost; ++i) CHECK(values[i] == i);
    values[0] = self->side == 0 ? 77 : 0;
    void* more = self->side == 0 ? post_send(self, comm, values, sizeof(int), &refused)
                                 : post_recv(self, comm, values, sizeof(int), &refused);
    CHECK(more != NULL && finish(self, more, got) == ncclSuccess && values[0] == 77);
    links_close(self, &links);
}

// ---- What must end with an error, and not hang

static void message_larger_than_room(Peer* self) {
    Links links;
    if (!links_open(self, &links, 1)) return;
    unsigned char data[128];
    unsigned refused = 0;
    int got = 0;
    fill(data, sizeof(data), 1);
    if (self->side == 0) {
        void* request = post_send(self, links.send[0], data, 101, &refused);
        CHECK(finish(self, request, &got) == ncclSuccess);
    } else {
        void* request = post_recv(self, links.recv[0], data, 100, &refused);
        CHECK(finish(self, request, &got) == ncclInvalidUsage);
        CHECK(post_recv(self, links.recv[0], data, 100, &refused) == NULL);
    }
    meet(self);
    links_close(self, &links);
}

// The system's buffers take some of what is sent to nobody.
static void receiver_closes(Peer* self) {
    Links links;
    if (!links_open(self, &links, 1)) return;
    unsigned char* data = calloc(1, kBig);
    unsigned refused = 0;
    int got = 0;
    if (self->side == 1) {
        CHECK(post_recv(self, links.recv[0], data, kBig, &refused) != NULL);
        CHECK(self->net->closeRecv(links.recv[0]) == ncclSuccess);
        links.recv[0] = NULL;
    }
    meet(self);
    if (self->side == 0) {
        ncclResult_t result = ncclSuccess;
        while (result == ncclSuccess) {
            result = finish(self, post_send(self, links.send[0], data, kBig, &refused), &got);
        }
        CHECK(result == ncclRemoteError);
        CHECK(post_send(self, links.send[0], data, 1, &refused) == NULL);
    }
    meet(self);
    links_close(self, &links);
    free(data);
}

// Sends until the system's buffers are full, and closes in the middle of a message.
static void send_and_close(Peer* self, Links* links, unsigned char* data) {
    unsigned refused = 0;
    int got = 0;
    for (int done = 1; done;) {
        void* request = post_send(self, links->send[0], data, kBig, &refused);
        if (!CHECK(self->net->test(request, &done, &got) == ncclSuccess)) break;
    }
    for (int i = 0; i < 2; ++i) {
        CHECK(self->net->closeSend(links->send[i]) == ncclSuccess);
        links->send[i] = NULL;
    }
}

// In the middle of a message, and before the first.
static void sender_closes(Peer* self) {
    Links links;
    if (!links_open(self, &links, 2)) return;
    unsigned char* data = calloc(1, kBig);
    unsigned refused = 0;
    int got = 0;
    if (self->side == 0) send_and_close(self, &links, data);
    meet(self);
    for (int i = 0; i < 2 && self->side == 1; ++i) {
        ncclResult_t result = ncclSuccess;
        while (result == ncclSuccess) {
            result = finish(self, post_recv(self, links.recv[i], data, kBig, &refused), &got);
        }
        CHECK(result == ncclRemoteError);
    }
    meet(self);
    links_close(self, &links);
    free(data);
}

// Calls connect until it fails, or gives what has come of it.
static ncclResult_t connect_fully(const Peer* self, PeerHandle* handle, void** comm) {
    *comm = NULL;
    for (;;) {
        NetDeviceHandle* device = NULL;
        const ncclResult_t result = self->net->connect(0, handle, comm, &device);
        if (result != ncclSuccess || *comm != NULL) return result;
    }
}

static void nobody_listens(Peer* self) {
    PeerHandle handle;
    void* listener = NULL;
    void* comm = NULL;
    CHECK(self->net->listen(0, &handle, &listener) == ncclSuccess);
    CHECK(self->net->closeListen(listener) == ncclSuccess);
    CHECK(connect_fully(self, &handle, &comm) == ncclSystemError);
}

// Somebody who found the port, but not the handle, is not taken for the peer.
static void stranger_connects(Peer* self) {
    enum { kTokenAt = 16, kTries = 2000 };  // the token follows the address
    PeerHandle handle;
    void* comm = NULL;
    NetDeviceHandle* device = NULL;
    if (self->side == 0) {
        void* listener = NULL;
        CHECK(self->net->listen(0, &handle, &listener) == ncclSuccess);
        tell(self, &handle, sizeof(handle));
        meet(self);  // the stranger has come
        bool fine = true;
        for (int i = 0; i < kTries && comm == NULL; ++i) {
            fine &= self->net->accept(listener, &comm, &device) == ncclSuccess;
        }
        CHECK(fine && comm == NULL);
        meet(self);
        while (comm == NULL && self->net->accept(listener, &comm, &device) == ncclSuccess) {
        }
        CHECK(comm != NULL && self->net->closeRecv(comm) == ncclSuccess);
        CHECK(self->net->closeListen(listener) == ncclSuccess);
        return;
    }
    hear(self, &handle, sizeof(handle));
    PeerHandle wrong = handle;
    wrong.bytes[kTokenAt] ^= 1;
    CHECK(connect_fully(self, &wrong, &comm) == ncclSuccess);
    meet(self);
    meet(self);
    if (comm != NULL) CHECK(self->net->closeSend(comm) == ncclSuccess);
    CHECK(connect_fully(self, &handle, &comm) == ncclSuccess);
    if (comm != NULL) CHECK(self->net->closeSend(comm) == ncclSuccess);
}

// ---- NCCL's own lines, which the program on GPUs reads

static void channel_lines(Peer* self) {
    NetLog log;
    FILE* file = fopen(self->log, "a");
    if (!CHECK(file != NULL)) return;
    fputs("host:1:2 [0] NCCL INFO Channel 00/02 : 0 1\n"
          "host:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/EP-test/0\n"
          "host:1:2 [0] NCCL INFO Channel 01/1 : 0[0] -> 1[0] [send] via NET/EP-test/0/Shared\n"
          "host:1:2 [0] NCCL INFO Channel 01/1 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
          "host:1:2 [0] NCCL INFO Channel 02/0 : 0[0] -> 1[1] via P2P/CUMEM\n",
          file);
    fclose(file);
    CHECK(net_log_read(self->log, &log) && log.channels == 2 && log.other_channels == 2);
    CHECK(!net_log_read("/no-such-file", &log));
}

int main(int argc, char** argv) {
    if (argc != 2 || !peers_open(argv[1])) {
        fprintf(stderr, "usage: selftest PLUGIN; it must have " NET_V8_SYMBOL "\n");
        return 2;
    }
    run_case("table", table);
    run_case("refusals", refusals);
    run_case("unknown_interface", unknown_interface);
    run_case("sizes_both_ways", sizes_both_ways);
    run_case("many_at_once", many_at_once);
    run_case("requests_run_out", requests_run_out);
    run_case("message_larger_than_room", message_larger_than_room);
    run_case("receiver_closes", receiver_closes);
    run_case("sender_closes", sender_closes);
    run_case("nobody_listens", nobody_listens);
    run_case("stranger_connects", stranger_connects);
    run_case("channel_lines", channel_lines);
    printf("%llu passed, %llu failed\n", checks_passed(), checks_failed());
    return checks_failed() == 0 ? 0 : 1;
}
