// One direction of one TCP connection: messages in order, and the requests that wait for them.
#pragma once

#include <nccl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    kRequests = 32,     // of a connection at a time
    kTryAgainEvery = 5  // this many calls, one is refused although it could be accepted
};

typedef struct Connection Connection;

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

// Takes the socket, which must not block; NULL if there is no memory.
Connection* connection_new(int socket, bool sends);
void connection_free(Connection* connection);

// Queues a message. NULL in *request: all requests are in use, or it is time for "try again".
ncclResult_t connection_post(Connection* connection, void* data, size_t bytes, void** request);

// Moves what the socket takes or has. A request that is done is free again after this call.
ncclResult_t connection_test(Request* request, bool* done, size_t* bytes);

// Moves bytes without waiting until all are through or the socket would block. *moved counts on.
ncclResult_t socket_move(int socket, bool sends, void* data, size_t bytes, size_t* moved);
