// Ranks as forked processes; see mpi.h. The process that forks them waits for them, and ends with
// the first status that is not 0, having ended the others.
#define _GNU_SOURCE  // MAP_ANONYMOUS
#include "mpi.h"

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kMaxRanks = 16, kSlotBytes = 1 << 16, kSignalled = 128 };

// Between two barriers each rank reads what the others have put into their slots.
typedef struct {
    pthread_barrier_t barrier;
    _Alignas(uint64_t) unsigned char slots[kMaxRanks][kSlotBytes];
} Shared;

static Shared* g_shared;
static int g_rank;
static int g_ranks = 1;
static int g_initialised;
static int g_finalised;

static void require(int holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "mpi.c: %s\n", what);
    _exit(1);
}

static void wait_for_ranks(const pid_t* children) {
    int first = 0;
    for (int left = g_ranks; left > 0; --left) {
        int status = 0;
        require(waitpid(-1, &status, 0) > 0, "no rank to wait for");
        const int code = WIFEXITED(status) ? WEXITSTATUS(status) : kSignalled + WTERMSIG(status);
        if (code == 0 || first != 0) continue;
        first = code;
        for (int i = 0; i < g_ranks; ++i) kill(children[i], SIGTERM);
    }
    _exit(first);
}

// Before other constructors, as mpirun would: what they make is a rank's own.
__attribute__((constructor(101))) static void start_ranks(void) {
    const char* chosen = getenv("EP_TEST_RANKS");
    if (chosen == NULL) return;
    g_ranks = (int)strtol(chosen, NULL, 10);
    require(g_ranks >= 1 && g_ranks <= kMaxRanks, "EP_TEST_RANKS must be 1 to 16");
    g_shared = mmap(NULL, sizeof(*g_shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    require(g_shared != MAP_FAILED, "mmap");
    pthread_barrierattr_t shared;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&g_shared->barrier, &shared, (unsigned)g_ranks);
    pid_t children[kMaxRanks];
    for (g_rank = 0; g_rank < g_ranks; ++g_rank) {
        children[g_rank] = fork();
        require(children[g_rank] >= 0, "fork");
        if (children[g_rank] > 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        return;
    }
    wait_for_ranks(children);
}

int MPI_Init(int* argc, char*** argv) {
    (void)argc;
    (void)argv;
    require(g_shared != NULL, "EP_TEST_RANKS must say how many ranks there are");
    g_initialised = 1;
    return MPI_SUCCESS;
}

int MPI_Initialized(int* flag) {
    *flag = g_initialised;
    return MPI_SUCCESS;
}

int MPI_Finalize(void) {
    MPI_Barrier(MPI_COMM_WORLD);
    g_finalised = 1;
    return MPI_SUCCESS;
}

int MPI_Finalized(int* flag) {
    *flag = g_finalised;
    return MPI_SUCCESS;
}

int MPI_Abort(MPI_Comm comm, int status) {
    (void)comm;
    fflush(NULL);
    _exit(status);
}

int MPI_Comm_rank(MPI_Comm comm, int* rank) {
    (void)comm;
    *rank = g_rank;
    return MPI_SUCCESS;
}

int MPI_Comm_size(MPI_Comm comm, int* size) {
    (void)comm;
    *size = g_ranks;
    return MPI_SUCCESS;
}

int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm* split) {
    (void)type;
    (void)key;
    (void)info;
    *split = comm;
    return MPI_SUCCESS;
}

int MPI_Comm_free(MPI_Comm* comm) {
    (void)comm;
    return MPI_SUCCESS;
}

int MPI_Barrier(MPI_Comm comm) {
    (void)comm;
    pthread_barrier_wait(&g_shared->barrier);
    return MPI_SUCCESS;
}

int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request) {
    *request = 0;
    return MPI_Barrier(comm);
}

int MPI_Test(MPI_Request* request, int* flag, MPI_Status* status) {
    *flag = 1;
    return MPI_Wait(request, status);
}

int MPI_Wait(MPI_Request* request, MPI_Status* status) {
    (void)request;
    (void)status;
    return MPI_SUCCESS;
}

static size_t bytes_of(MPI_Datatype type, int count) {
    const size_t sizes[] = {[MPI_BYTE] = 1,
                            [MPI_CHAR] = 1,
                            [MPI_INT] = sizeof(int),
                            [MPI_UNSIGNED] = sizeof(unsigned),
                            [MPI_UINT64_T] = sizeof(uint64_t)};
    return sizes[type] * (size_t)count;
}

int MPI_Bcast(void* buffer, int count, MPI_Datatype type, int root, MPI_Comm comm) {
    const size_t bytes = bytes_of(type, count);
    for (size_t at = 0; at < bytes; at += kSlotBytes) {
        const size_t piece = bytes - at < kSlotBytes ? bytes - at : kSlotBytes;
        unsigned char* mine = (unsigned char*)buffer + at;
        if (g_rank == root) memcpy(g_shared->slots[root], mine, piece);
        MPI_Barrier(comm);
        if (g_rank != root) memcpy(mine, g_shared->slots[root], piece);
        MPI_Barrier(comm);
    }
    return MPI_SUCCESS;
}

int MPI_Allgather(const void* send, int send_count, MPI_Datatype send_type, void* receive,
                  int receive_count, MPI_Datatype receive_type, MPI_Comm comm) {
    (void)receive_count;
    (void)receive_type;
    const size_t bytes = bytes_of(send_type, send_count);
    require(bytes <= kSlotBytes, "MPI_Allgather of too much");
    memcpy(g_shared->slots[g_rank], send, bytes);
    MPI_Barrier(comm);
    for (int i = 0; i < g_ranks; ++i) memcpy((unsigned char*)receive + (size_t)i * bytes, g_shared->slots[i], bytes);
    return MPI_Barrier(comm);
}

static void reduce(void* into, const void* from, size_t at, MPI_Datatype type, MPI_Op op) {
#define REDUCE(T)                                        \
    do {                                                 \
        T* a = (T*)into + at;                            \
        const T b = ((const T*)from)[at];                \
        *a = op == MPI_SUM ? *a + b : (*a > b ? *a : b); \
    } while (0)
    if (type == MPI_INT) REDUCE(int);
    if (type == MPI_UNSIGNED) REDUCE(unsigned);
    if (type == MPI_UINT64_T) REDUCE(uint64_t);
#undef REDUCE
}

int MPI_Allreduce(const void* send, void* receive, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
    const size_t bytes = bytes_of(type, count);
    require(bytes <= kSlotBytes && type >= MPI_INT, "MPI_Allreduce of too much, or of bytes");
    memcpy(g_shared->slots[g_rank], send == MPI_IN_PLACE ? receive : send, bytes);
    MPI_Barrier(comm);
    memcpy(receive, g_shared->slots[0], bytes);
    for (int i = 1; i < g_ranks; ++i) {
        for (size_t at = 0; at < (size_t)count; ++at) reduce(receive, g_shared->slots[i], at, type, op);
    }
    return MPI_Barrier(comm);
}
