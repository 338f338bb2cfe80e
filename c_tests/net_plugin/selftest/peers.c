// Two processes and a plugin; see peers.h.
#define _GNU_SOURCE  // MAP_ANONYMOUS, P_tmpdir, mkstemp
#include "net_plugin/selftest/peers.h"

#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct {
    atomic_ullong passed, failed;
} Counters;

static Counters* g_counters;  // shared by both processes
static void* g_library;
static const char* g_case = "";
static FILE* g_log;

bool check(bool passed, const char* file, int line, const char* text) {
    atomic_fetch_add(passed ? &g_counters->passed : &g_counters->failed, 1);
    if (!passed) fprintf(stderr, "%s: %s:%d: %s failed\n", g_case, file, line, text);
    return passed;
}

unsigned long long checks_passed(void) { return atomic_load(&g_counters->passed); }
unsigned long long checks_failed(void) { return atomic_load(&g_counters->failed); }

bool library_has(const char* symbol) { return dlsym(g_library, symbol) != NULL; }
const NetTableV8* peers_net(void) { return dlsym(g_library, NET_V8_SYMBOL); }

bool peers_open(const char* library) {
    g_counters = mmap(NULL, sizeof(*g_counters), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (g_counters == MAP_FAILED) return false;
    g_library = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (g_library == NULL) fprintf(stderr, "%s\n", dlerror());
    return g_library != NULL && peers_net() != NULL;
}

// As NCCL's: one line, with a place in front.
__attribute__((format(printf, 5, 6)))
static void log_line(int level, unsigned long subsystems, const char* file, int line,
                     const char* format, ...) {
    (void)subsystems;
    if (g_log == NULL) return;
    fprintf(g_log, "host:%d [0] %s:%d %s ", (int)getpid(), file, line,
            level == kNetLogWarn ? "NCCL WARN" : "NCCL INFO");
    va_list arguments;
    va_start(arguments, format);
    vfprintf(g_log, format, arguments);
    va_end(arguments);
    fputc('\n', g_log);
    fflush(g_log);
}

static void on_alarm(int number) {
    (void)number;
    static const char text[] = "hung in case ";
    if (write(STDERR_FILENO, text, sizeof(text) - 1) < 0 ||
        write(STDERR_FILENO, g_case, strlen(g_case)) < 0 || write(STDERR_FILENO, "\n", 1) < 0) {
        _exit(125);
    }
    _exit(124);  // the child dies with its parent
}

static void run_side(Peer* self, void (*run)(Peer* self)) {
    signal(SIGALRM, on_alarm);
    alarm(kWatchdogSeconds);
    snprintf(self->log, sizeof(self->log), "%s", P_tmpdir "/ep-net-XXXXXX");
    const int file = mkstemp(self->log);
    g_log = file >= 0 ? fdopen(file, "w") : NULL;
    if (CHECK(g_log != NULL) && CHECK(self->net->init(log_line) == ncclSuccess)) run(self);
    if (g_log != NULL) fclose(g_log);
    g_log = NULL;
    if (file >= 0) unlink(self->log);
    close(self->control);
    alarm(0);
}

void run_case(const char* name, void (*run)(Peer* self)) {
    int pair[2];
    g_case = name;
    const unsigned long long failed_before = checks_failed();
    if (!CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0)) return;
    fflush(NULL);
    const pid_t child = fork();
    if (!CHECK(child >= 0)) return;
    Peer self = {.net = peers_net(), .side = child == 0, .control = pair[child == 0]};
    close(pair[child != 0]);
    if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
    run_side(&self, run);
    if (child == 0) {
        fflush(NULL);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    printf("%-32s %s\n", name, checks_failed() == failed_before ? "ok" : "FAILED");
}

void tell(const Peer* self, const void* data, size_t bytes) {
    if (send(self->control, data, bytes, MSG_NOSIGNAL) != (ssize_t)bytes) CHECK(!"tell");
}

void hear(const Peer* self, void* data, size_t bytes) {
    if (recv(self->control, data, bytes, MSG_WAITALL) != (ssize_t)bytes) CHECK(!"hear");
}

void meet(const Peer* self) {
    char here = 1;
    tell(self, &here, sizeof(here));
    hear(self, &here, sizeof(here));
}

bool links_open(const Peer* self, Links* links, int count) {
    void* listeners[kMaxLinks];
    PeerHandle handles[kMaxLinks];
    memset(links, 0, sizeof(*links));
    links->count = count;
    for (int i = 0; i < count; ++i) {
        if (!CHECK(self->net->listen(0, &handles[i], &listeners[i]) == ncclSuccess)) return false;
        tell(self, &handles[i], sizeof(handles[i]));
    }
    for (int i = 0; i < count; ++i) hear(self, &handles[i], sizeof(handles[i]));
    unsigned again = 0;
    bool fine = true;
    for (int open = 0; fine && open < 2 * count;) {
        open = 0;
        for (int i = 0; i < count; ++i) {
            NetDeviceHandle* device = NULL;
            if (links->send[i] == NULL) {
                fine &= self->net->connect(0, &handles[i], &links->send[i], &device) == ncclSuccess;
            }
            if (links->recv[i] == NULL) {
                fine &= self->net->accept(listeners[i], &links->recv[i], &device) == ncclSuccess;
            }
            open += (links->send[i] != NULL) + (links->recv[i] != NULL);
            fine &= device == NULL;
        }
        again += open < 2 * count;
        sched_yield();
    }
    for (int i = 0; i < count; ++i) CHECK(self->net->closeListen(listeners[i]) == ncclSuccess);
    return CHECK(fine) && CHECK(again > 0);
}

void links_close(const Peer* self, Links* links) {
    for (int i = 0; i < links->count; ++i) {
        if (links->send[i] != NULL) CHECK(self->net->closeSend(links->send[i]) == ncclSuccess);
        if (links->recv[i] != NULL) CHECK(self->net->closeRecv(links->recv[i]) == ncclSuccess);
    }
}

void* post_send(const Peer* self, void* comm, void* data, int bytes, unsigned* refused) {
    void* request = NULL;
    while (self->net->isend(comm, data, bytes, 0, NULL, &request) == ncclSuccess) {
        if (request != NULL) return request;
        ++*refused;
    }
    return NULL;
}

void* post_recv(const Peer* self, void* comm, void* data, int bytes, unsigned* refused) {
    void* request = NULL;
    void* registration = NULL;
    int tag = 0;
    while (self->net->irecv(comm, 1, &data, &bytes, &tag, &registration, &request) == ncclSuccess) {
        if (request != NULL) return request;
        ++*refused;
    }
    return NULL;
}

ncclResult_t finish(const Peer* self, void* request, int* size) {
    return finish_all(self, &request, size, 1);
}

ncclResult_t finish_all(const Peer* self, void** requests, int* sizes, int count) {
    for (int i = 0; i < count; ++i) {
        if (!CHECK(requests[i] != NULL)) return ncclInternalError;
    }
    for (int left = count; left > 0;) {
        for (int i = 0; i < count; ++i) {
            if (requests[i] == NULL) continue;
            int done = 0;
            const ncclResult_t result = self->net->test(requests[i], &done, &sizes[i]);
            if (result != ncclSuccess) return result;
            if (!done) continue;
            requests[i] = NULL;
            --left;
        }
        sched_yield();
    }
    return ncclSuccess;
}

static unsigned char expected_byte(size_t at, uint64_t seed) {
    const uint64_t word = (at / 8 + seed) * 0x9e3779b97f4a7c15u;
    return (unsigned char)((word ^ (word >> 29)) >> (8 * (at % 8)));
}

void fill(unsigned char* data, size_t bytes, uint64_t seed) {
    for (size_t i = 0; i < bytes; ++i) data[i] = expected_byte(i, seed);
}

bool is_filled(const unsigned char* data, size_t bytes, uint64_t seed) {
    for (size_t i = 0; i < bytes; ++i) {
        if (data[i] != expected_byte(i, seed)) return false;
    }
    return true;
}
