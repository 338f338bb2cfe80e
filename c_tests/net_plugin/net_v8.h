// Version 8 of NCCL's interface for network plugins, declared from its documented fields. The
// layout is the contract: NCCL looks a plugin's table up by name and calls through it unchecked.
#pragma once

#include <assert.h>
#include <nccl.h>
#include <stddef.h>
#include <stdint.h>

enum {
    kNetHandleBytes = 128,  // what a listener tells its peer, at most
    kNetPointerHost = 1,    // a kind of memory: a bit of ptrSupport
    kNetDeviceHost = 0,     // netDeviceType of a network without offload
    kNetLogWarn = 2,        // levels of the logger
    kNetLogInfo = 3,
    kNetLogInit = 1,        // its subsystems, as bits; this one is logged by default
    kNetLogNet = 16
};

typedef void (*NetLogger)(int level, unsigned long subsystems, const char* file, int line,
                          const char* format, ...) __attribute__((format(printf, 5, 6)));

typedef struct {
    char* name;
    char* pciPath;     // below /sys; NULL if the device is not on a PCI bus
    uint64_t guid;     // the same for ports of one chip
    int ptrSupport;    // the kinds of memory that can be sent from and received into
    int regIsGlobal;   // a registration serves all connections
    int speed;         // Mbit/s
    int port;
    float latency;     // 0: unknown
    int maxComms;      // connections
    int maxRecvs;      // receives in one group
    int netDeviceType;
    int netDeviceVersion;
} NetPropertiesV8;

typedef struct NetDeviceHandle NetDeviceHandle;  // only networks with offload have one

typedef struct {
    const char* name;
    ncclResult_t (*init)(NetLogger logger);
    ncclResult_t (*devices)(int* count);
    ncclResult_t (*getProperties)(int device, NetPropertiesV8* properties);
    // A handle goes to the peer, which connects with its copy. connect and accept do not block:
    // they succeed with a NULL comm until the connection is there, and are called again.
    ncclResult_t (*listen)(int device, void* handle, void** listen_comm);
    ncclResult_t (*connect)(int device, void* handle, void** send_comm, NetDeviceHandle** device_handle);
    ncclResult_t (*accept)(void* listen_comm, void** recv_comm, NetDeviceHandle** device_handle);
    ncclResult_t (*regMr)(void* comm, void* data, size_t bytes, int type, void** registration);
    ncclResult_t (*regMrDmaBuf)(void* comm, void* data, size_t bytes, int type, uint64_t offset,
                                int fd, void** registration);
    ncclResult_t (*deregMr)(void* comm, void* registration);
    // A NULL request: try again. A receive may get fewer bytes than it has room for.
    ncclResult_t (*isend)(void* send_comm, void* data, int bytes, int tag, void* registration, void** request);
    ncclResult_t (*irecv)(void* recv_comm, int count, void** data, int* bytes, int* tags,
                          void** registrations, void** request);
    ncclResult_t (*iflush)(void* recv_comm, int count, void** data, int* bytes, void** registrations, void** request);
    // Once done is 1, the request does not exist any more. sizes may be NULL.
    ncclResult_t (*test)(void* request, int* done, int* sizes);
    ncclResult_t (*closeSend)(void* send_comm);
    ncclResult_t (*closeRecv)(void* recv_comm);
    ncclResult_t (*closeListen)(void* listen_comm);
    ncclResult_t (*getDeviceMr)(void* comm, void* registration, void** device_registration);
    ncclResult_t (*irecvConsumed)(void* recv_comm, int count, void* request);
} NetTableV8;

static_assert(offsetof(NetPropertiesV8, guid) == 16 && offsetof(NetPropertiesV8, ptrSupport) == 24 &&
                  offsetof(NetPropertiesV8, regIsGlobal) == 28 && offsetof(NetPropertiesV8, speed) == 32 &&
                  offsetof(NetPropertiesV8, latency) == 40 && offsetof(NetPropertiesV8, maxRecvs) == 48 &&
                  offsetof(NetPropertiesV8, netDeviceVersion) == 56 && sizeof(NetPropertiesV8) == 64,
              "layout");
static_assert(offsetof(NetTableV8, regMr) == 7 * sizeof(void*) && offsetof(NetTableV8, isend) == 10 * sizeof(void*) &&
                  offsetof(NetTableV8, test) == 13 * sizeof(void*) && sizeof(NetTableV8) == 19 * sizeof(void*),
              "layout");
