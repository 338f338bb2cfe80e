// Two processes with connections between them over the plugin, and their counted checks.
#ifndef C_TESTS_NET_PLUGIN_SELFTEST_PEERS_H_
#define C_TESTS_NET_PLUGIN_SELFTEST_PEERS_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "net_plugin/net_v8.h"

enum { kMaxLinks = 4, kWatchdogSeconds = 60 };

typedef struct {
    unsigned char bytes[kNetHandleBytes];
} PeerHandle;

// One of the two processes of a case.
typedef struct {
    const NetTableV8* net;
    int side;     // 0 is the process that ends with the counts, 1 its child
    int control;  // a socket to the other one
    char log[64];  // the file of what the plugin logs in this process
} Peer;

// Counts a check of either process and prints it if it failed.
#define CHECK(condition) check((condition), __FILE__, __LINE__, #condition)
bool check(bool passed, const char* file, int line, const char* text);
unsigned long long checks_passed(void);
unsigned long long checks_failed(void);

// Loads the plugin and makes the counters; false if there is no table of version 8 in it.
bool peers_open(const char* library);
const NetTableV8* peers_net(void);
bool library_has(const char* symbol);

// Runs `run` in two processes, which start with an initialised plugin.
void run_case(const char* name, void (*run)(Peer* self));

// Between the two, beside the plugin.
void tell(const Peer* self, const void* data, size_t bytes);
void hear(const Peer* self, void* data, size_t bytes);
void meet(const Peer* self);

// Both sides: `count` connections in each direction; send[i] of one side ends at recv[i] of the
// other.
typedef struct {
    int count;
    void* send[kMaxLinks];
    void* recv[kMaxLinks];
} Links;
bool links_open(const Peer* self, Links* links, int count);
void links_close(const Peer* self, Links* links);

// Calls until there is a request; *refused counts the answers without one. NULL after an error.
void* post_send(const Peer* self, void* comm, void* data, int bytes, unsigned* refused);
void* post_recv(const Peer* self, void* comm, void* data, int bytes, unsigned* refused);

// Tests until the request is done or failed. NULL in place of a request is a failed check.
ncclResult_t finish(const Peer* self, void* request, int* size);
// The same for several: they may depend on each other. Returns the first failure.
ncclResult_t finish_all(const Peer* self, void** requests, int* sizes, int count);

// Bytes that both sides can compute.
void fill(unsigned char* data, size_t bytes, uint64_t seed);
bool is_filled(const unsigned char* data, size_t bytes, uint64_t seed);

#endif  // C_TESTS_NET_PLUGIN_SELFTEST_PEERS_H_
