// A network plugin for NCCL, as a third party would write one: TCP over one IPv4 interface, host
// memory only, one receive in a group. It refuses calls that it could accept, as a loaded network
// does, and logs what every connection carried.
//
// EP_TEST_NET_IFNAME chooses the interface; by default it is the first that is up.
#define _GNU_SOURCE  // accept4, getifaddrs
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/random.h>

#include "net_plugin/connection.h"
#include "net_plugin/net_v8.h"

// NCCL's functions have parameters that a plugin over host memory does not need.
#pragma GCC diagnostic ignored "-Wunused-parameter"

#define NET_PLUGIN_NAME "EP-test"

enum { kDevice = 0, kSpeedMbit = 10000, kMaxConnections = 65536, kBacklog = 64 };

typedef enum { kNotStarted, kRefusedOnce, kConnecting, kGreeting } Stage;

// What listen tells the peer; and how far the peer's connect has come, in its own copy.
typedef struct {
    struct sockaddr_in address;
    uint64_t token;  // what a peer says first, so that nobody else's connection is taken for its own
    int socket;
    Stage stage;
    size_t greeted;
} Handle;
static_assert(sizeof(Handle) <= kNetHandleBytes, "a handle has to fit");

typedef struct {
    int socket;
    uint64_t expected;
    bool refused_once;
    int guest;  // accepted, but not greeted yet; or -1
    uint64_t token;
    size_t greeted;
} Listener;

// Written by init, before any other call.
static NetLogger g_logger;
static struct sockaddr_in g_address;
static char g_interface[IF_NAMESIZE];

#define LOG(level, ...)                                                                      \
    do {                                                                                     \
        if (g_logger != NULL) {                                                              \
            g_logger(level, kNetLogInit | kNetLogNet, __func__, __LINE__, __VA_ARGS__);      \
        }                                                                                    \
    } while (0)

static ncclResult_t system_error(const char* call) {
    const int number = errno;
    LOG(kNetLogWarn, "NET/" NET_PLUGIN_NAME ": %s: %s", call, strerror(number));
    return ncclSystemError;
}

static bool suits(const struct ifaddrs* entry, const char* wanted) {
    if (entry->ifa_addr == NULL || entry->ifa_addr->sa_family != AF_INET) return false;
    if (wanted != NULL && wanted[0] != '\0') return strcmp(entry->ifa_name, wanted) == 0;
    return (entry->ifa_flags & IFF_UP) != 0;
}

static ncclResult_t plugin_init(NetLogger logger) {
    g_logger = logger;
    struct ifaddrs* all = NULL;
    if (getifaddrs(&all) != 0) return system_error("getifaddrs");
    const char* wanted = getenv("EP_TEST_NET_IFNAME");
    const struct ifaddrs* chosen = all;
    while (chosen != NULL && !suits(chosen, wanted)) chosen = chosen->ifa_next;
    if (chosen != NULL) {
        memcpy(&g_address, chosen->ifa_addr, sizeof(g_address));
        g_address.sin_port = 0;
        strncpy(g_interface, chosen->ifa_name, sizeof(g_interface) - 1);
    }
    const bool found = chosen != NULL;
    freeifaddrs(all);
    if (!found) {
        LOG(kNetLogWarn, "NET/" NET_PLUGIN_NAME ": no IPv4 interface%s%s", wanted ? " " : "", wanted ? wanted : "");
        return ncclSystemError;
    }
    char text[INET_ADDRSTRLEN] = "";
    inet_ntop(AF_INET, &g_address.sin_addr, text, sizeof(text));
    LOG(kNetLogInfo, "NET/" NET_PLUGIN_NAME ": over %s, %s", g_interface, text);
    return ncclSuccess;
}

static ncclResult_t plugin_devices(int* count) {
    *count = 1;
    return ncclSuccess;
}

static ncclResult_t plugin_get_properties(int device, NetPropertiesV8* properties) {
    if (device != kDevice) return ncclInvalidArgument;
    *properties = (NetPropertiesV8){.name = g_interface,
                                    .ptrSupport = kNetPointerHost,
                                    .speed = kSpeedMbit,
                                    .maxComms = kMaxConnections,
                                    .maxRecvs = 1,
                                    .netDeviceType = kNetDeviceHost};
    return ncclSuccess;
}

static int open_socket(void) {
    const int one = 1;
    const int opened = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (opened >= 0) setsockopt(opened, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    return opened;
}

static ncclResult_t close_with(int socket, ncclResult_t result) {
    close(socket);
    return result;
}

static ncclResult_t plugin_listen(int device, void* handle, void** listen_comm) {
    if (device != kDevice) return ncclInvalidArgument;
    Handle made = {.address = g_address, .socket = -1};
    if (getrandom(&made.token, sizeof(made.token), 0) != sizeof(made.token)) return system_error("getrandom");
    const int listening = open_socket();
    if (listening < 0) return system_error("socket");
    socklen_t length = sizeof(made.address);
    if (bind(listening, (struct sockaddr*)&made.address, sizeof(made.address)) != 0 ||
        listen(listening, kBacklog) != 0 || getsockname(listening, (struct sockaddr*)&made.address, &length) != 0) {
        return close_with(listening, system_error("listen"));
    }
    Listener* listener = malloc(sizeof(*listener));
    if (listener == NULL) return close_with(listening, system_error("malloc"));
    *listener = (Listener){.socket = listening, .expected = made.token, .guest = -1};
    memset(handle, 0, kNetHandleBytes);
    memcpy(handle, &made, sizeof(made));
    *listen_comm = listener;
    return ncclSuccess;
}

// One step towards a connection; *connected once the greeting is out.
static ncclResult_t connect_step(Handle* handle, bool* connected) {
    if (handle->stage == kNotStarted) {
        handle->stage = kRefusedOnce;
        return ncclSuccess;
    }
    if (handle->stage == kRefusedOnce) {
        handle->socket = open_socket();
        if (handle->socket < 0) return system_error("socket");
        handle->stage = kConnecting;
        if (connect(handle->socket, (struct sockaddr*)&handle->address, sizeof(handle->address)) != 0 &&
            errno != EINPROGRESS) {
            return close_with(handle->socket, system_error("connect"));
        }
    }
    if (handle->stage == kConnecting) {
        struct pollfd ready = {.fd = handle->socket, .events = POLLOUT};
        if (poll(&ready, 1, 0) == 0) return ncclSuccess;
        int error = 0;
        socklen_t length = sizeof(error);
        getsockopt(handle->socket, SOL_SOCKET, SO_ERROR, &error, &length);
        errno = error;
        if (error != 0) return close_with(handle->socket, system_error("connect"));
        handle->stage = kGreeting;
    }
    const ncclResult_t result =
        socket_move(handle->socket, true, &handle->token, sizeof(handle->token), &handle->greeted);
    *connected = handle->greeted == sizeof(handle->token);
    return result == ncclSuccess ? result : close_with(handle->socket, result);
}

// A socket in hand becomes a connection.
static ncclResult_t give(int socket, bool sends, void** comm) {
    *comm = connection_new(socket, sends);
    return *comm != NULL ? ncclSuccess : close_with(socket, system_error("calloc"));
}

static ncclResult_t plugin_connect(int device, void* handle, void** send_comm, NetDeviceHandle** device_handle) {
    *send_comm = NULL;
    if (device != kDevice) return ncclInvalidArgument;
    if (device_handle != NULL) *device_handle = NULL;
    Handle state;  // the caller's copy need not be aligned
    memcpy(&state, handle, sizeof(state));
    bool connected = false;
    const ncclResult_t result = connect_step(&state, &connected);
    memcpy(handle, &state, sizeof(state));
    return connected ? give(state.socket, true, send_comm) : result;
}

static void drop_guest(Listener* listener) {
    if (listener->guest >= 0) close(listener->guest);
    listener->guest = -1;
    listener->greeted = 0;
}

static ncclResult_t plugin_accept(void* listen_comm, void** recv_comm, NetDeviceHandle** device_handle) {
    Listener* listener = listen_comm;
    *recv_comm = NULL;
    if (device_handle != NULL) *device_handle = NULL;
    if (!listener->refused_once) {
        listener->refused_once = true;
        return ncclSuccess;
    }
    if (listener->guest < 0) {
        listener->guest = accept4(listener->socket, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        const bool none = errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
        if (listener->guest < 0) return none ? ncclSuccess : system_error("accept");
    }
    const ncclResult_t moved =
        socket_move(listener->guest, false, &listener->token, sizeof(listener->token), &listener->greeted);
    const bool is_greeted = listener->greeted == sizeof(listener->token);
    if (moved == ncclSuccess && !is_greeted) return ncclSuccess;
    const int guest = listener->guest;
    const bool is_expected = moved == ncclSuccess && listener->token == listener->expected;
    if (is_expected) listener->guest = -1;
    drop_guest(listener);
    return is_expected ? give(guest, false, recv_comm) : ncclSuccess;
}

static ncclResult_t plugin_reg_mr(void* comm, void* data, size_t bytes, int type, void** registration) {
    *registration = comm;  // host memory needs nothing; deregMr sees that its arguments are right
    return type == kNetPointerHost ? ncclSuccess : ncclInvalidArgument;
}

static ncclResult_t plugin_dereg_mr(void* comm, void* registration) {
    return registration == comm ? ncclSuccess : ncclInvalidArgument;
}

static ncclResult_t plugin_isend(void* send_comm, void* data, int bytes, int tag, void* registration, void** request) {
    *request = NULL;
    if (bytes < 0) return ncclInvalidArgument;
    return connection_post(send_comm, data, (size_t)bytes, request);
}

static ncclResult_t plugin_irecv(void* recv_comm, int count, void** data, int* bytes, int* tags,
                                 void** registrations, void** request) {
    *request = NULL;
    if (count != 1 || bytes[0] < 0) return ncclInvalidArgument;
    return connection_post(recv_comm, data[0], (size_t)bytes[0], request);
}

// For memory of a GPU, which this plugin does not take.
static ncclResult_t plugin_iflush(void* recv_comm, int count, void** data, int* bytes,
                                  void** registrations, void** request) {
    *request = NULL;
    return ncclInternalError;
}

static ncclResult_t plugin_test(void* tested, int* done, int* sizes) {
    Request* request = tested;
    Connection* connection = request->connection;
    if (!request->done && connection->failure == ncclSuccess) connection->failure = advance(connection);
    *done = request->done;
    if (request->done && sizes != NULL) sizes[0] = (int)request->bytes;
    if (!request->done) return connection->failure;
    request->connection = NULL;
    return ncclSuccess;
}

// NCCL closes what it could not open, too.
static ncclResult_t close_connection(Connection* connection, const char* did) {
    if (connection == NULL) return ncclSuccess;
    LOG(kNetLogInfo, "NET/" NET_PLUGIN_NAME ": %s %llu bytes in %llu messages", did,
        (unsigned long long)connection->bytes, (unsigned long long)connection->messages);
    connection_free(connection);
    return ncclSuccess;
}

static ncclResult_t plugin_close_send(void* comm) { return close_connection(comm, "sent"); }
static ncclResult_t plugin_close_recv(void* comm) { return close_connection(comm, "received"); }

static ncclResult_t plugin_close_listen(void* listen_comm) {
    Listener* listener = listen_comm;
    if (listener == NULL) return ncclSuccess;
    drop_guest(listener);
    close(listener->socket);
    free(listener);
    return ncclSuccess;
}

// Only this version, so that NCCL has to come down to it.
extern __attribute__((visibility("default"))) const NetTableV8 ncclNetPlugin_v8;
const NetTableV8 ncclNetPlugin_v8 = {
    .name = NET_PLUGIN_NAME,
    .init = plugin_init,
    .devices = plugin_devices,
    .getProperties = plugin_get_properties,
    .listen = plugin_listen,
    .connect = plugin_connect,
    .accept = plugin_accept,
    .regMr = plugin_reg_mr,
    .regMrDmaBuf = NULL,  // says that there is no DMA-BUF
    .deregMr = plugin_dereg_mr,
    .isend = plugin_isend,
    .irecv = plugin_irecv,
    .iflush = plugin_iflush,
    .test = plugin_test,
    .closeSend = plugin_close_send,
    .closeRecv = plugin_close_recv,
    .closeListen = plugin_close_listen,
    .getDeviceMr = NULL,
    .irecvConsumed = NULL,
};
