// One direction of one TCP connection: messages in order, and the requests that wait for them. There are no threads:
// bytes move inside test().
#pragma once

#include <errno.h>
#include <nccl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

typedef struct Connection Connection;

enum {
    kRequests = 32,     // of a connection at a time
    kTryAgainEvery = 5  // this many calls, one is refused although it could be accepted
};

typedef struct {
    Connection* connection;  // NULL: free
    char* data;
    size_t bytes;  // of a receive: the room, and the size of the message once that is known
    size_t moved;
    bool done;
} Request;

// In front of each message. The number finds messages that are lost, repeated or cut.
typedef struct {
    uint32_t magic;
    uint32_t number;
    uint64_t bytes;
} MessageHeader;

struct Connection {
    int socket;
    bool sends;
    ncclResult_t failure;  // the first one; nothing moves after it
    uint64_t calls, bytes, messages;
    MessageHeader header;  // of the message that is on its way
    size_t header_moved;
    Request requests[kRequests];
    Request* waiting[kRequests];  // a ring, in the order of the messages
    unsigned first_waiting, num_waiting;
};

static const uint32_t kMessageMagic = 0x4d505445;

static Connection* connection_new(int socket, bool sends) {
    Connection* connection = calloc(1, sizeof(*connection));
    if (connection == NULL) return NULL;
    connection->socket = socket;
    connection->sends = sends;
    return connection;
}

static void connection_free(Connection* connection) {
    close(connection->socket);
    free(connection);
}

static Request* free_request(Connection* connection) {
    for (unsigned i = 0; i < kRequests; ++i) {
        if (connection->requests[i].connection == NULL) return &connection->requests[i];
    }
    return NULL;
}

// Queues a message. NULL in *request: all requests are in use, or it is time for "try again".
static ncclResult_t connection_post(Connection* connection, void* data, size_t bytes, void** request) {
    *request = NULL;
    if (connection->failure != ncclSuccess) return connection->failure;
    if (++connection->calls % kTryAgainEvery == 0) return ncclSuccess;
    Request* taken = free_request(connection);
    if (taken == NULL) return ncclSuccess;
    *taken = (Request){.connection = connection, .data = data, .bytes = bytes};
    const unsigned last = (connection->first_waiting + connection->num_waiting) % kRequests;
    connection->waiting[last] = taken;
    ++connection->num_waiting;
    *request = taken;
    return ncclSuccess;
}

// Moves bytes without waiting until all are through or the socket would block. *moved counts on.
static ncclResult_t socket_move(int socket, bool sends, void* data, size_t bytes, size_t* moved) {
    while (*moved < bytes) {
        char* at = (char*)data + *moved;
        const size_t left = bytes - *moved;
        const ssize_t now =
            sends ? send(socket, at, left, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(socket, at, left, MSG_DONTWAIT);
        if (now > 0) {
            *moved += (size_t)now;
        } else if (now == 0) {
            return ncclRemoteError;  // closed
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return ncclSuccess;
        } else if (errno != EINTR) {
            return errno == EPIPE || errno == ECONNRESET ? ncclRemoteError : ncclSystemError;
        }
    }
    return ncclSuccess;
}

// The header of the message in front. A receive learns from it how many bytes will come.
static ncclResult_t move_header(Connection* connection, Request* request) {
    MessageHeader* header = &connection->header;
    if (connection->sends && connection->header_moved == 0) {
        *header = (MessageHeader){kMessageMagic, (uint32_t)connection->messages, request->bytes};
    }
    const ncclResult_t moved =
        socket_move(connection->socket, connection->sends, header, sizeof(*header), &connection->header_moved);
    if (connection->sends || moved != ncclSuccess || connection->header_moved < sizeof(*header)) return moved;
    if (header->magic != kMessageMagic || header->number != (uint32_t)connection->messages) {
        return ncclInternalError;
    }
    if (header->bytes > request->bytes) return ncclInvalidUsage;  // would be cut
    request->bytes = (size_t)header->bytes;
    return ncclSuccess;
}

// Moves messages until one has to wait for the socket.
static ncclResult_t advance(Connection* connection) {
    while (connection->num_waiting > 0) {
        Request* request = connection->waiting[connection->first_waiting];
        if (connection->header_moved < sizeof(connection->header)) {
            const ncclResult_t result = move_header(connection, request);
            if (result != ncclSuccess) return result;
            if (connection->header_moved < sizeof(connection->header)) return ncclSuccess;
        }
        const ncclResult_t result =
            socket_move(connection->socket, connection->sends, request->data, request->bytes, &request->moved);
        if (result != ncclSuccess || request->moved < request->bytes) return result;
        request->done = true;
        connection->bytes += request->bytes;
        ++connection->messages;
        connection->header_moved = 0;
        connection->first_waiting = (connection->first_waiting + 1) % kRequests;
        --connection->num_waiting;
    }
    return ncclSuccess;
}
