// Communicators of the test-only NCCL: creation, questions, splitting and the end of one. The names
// and signatures are NCCL's; see README.md for what is different.
#define _GNU_SOURCE  // nanosleep
#include "comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kJoinSeconds = 60, kAbortPauseNs = 1000000 };

_Static_assert(kMeetingNameBytes <= NCCL_UNIQUE_ID_BYTES, "a unique id holds the meeting's name");

static const size_t kOwnBytes = kMeetingSlotBytes;

// By this name programs know that communicators of one process take turns (README.md).
FAKE_NCCL_EXPORT int ncclEpFakeNccl(void);
int ncclEpFakeNccl(void) { return 1; }

FAKE_NCCL_EXPORT ncclResult_t ncclGetVersion(int* version) {
    if (version == NULL) return ncclInvalidArgument;
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

FAKE_NCCL_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    if (id == NULL) return ncclInvalidArgument;
    memset(id, 0, sizeof(*id));
    return meeting_new_name(id->internal) ? ncclSuccess : ncclSystemError;
}

static void free_comm(ncclComm_t comm) {
    if (comm->staged != NULL) cudaFreeHost(comm->staged);
    if (comm->last != NULL) cudaEventDestroy(comm->last);
    meeting_close(&comm->meeting);
    free(comm);
}

static bool make_resources(ncclComm_t comm, int num_ranks) {
    const size_t bytes = kOwnBytes + (size_t)num_ranks * kMeetingSlotBytes;
    return cudaGetDevice(&comm->device) == cudaSuccess &&
           cudaEventCreateWithFlags(&comm->last, cudaEventDisableTiming) == cudaSuccess &&
           cudaHostAlloc((void**)&comm->staged, bytes, cudaHostAllocDefault) == cudaSuccess;
}

FAKE_NCCL_EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
    if (comm == NULL || nranks < 1 || nranks > kMeetingMaxRanks || rank < 0 || rank >= nranks) {
        return ncclInvalidArgument;
    }
    ncclComm_t created = calloc(1, sizeof(*created));
    if (created == NULL) return ncclSystemError;
    id.internal[kMeetingNameBytes - 1] = '\0';
    const bool able = make_resources(created, nranks);
    if (!meeting_join(&created->meeting, id.internal, nranks, rank, kJoinSeconds) || !able) {
        fprintf(stderr, "fake NCCL: rank %d of %d: %s\n", rank, nranks,
                able ? "the ranks did not meet" : "no device, event or pinned memory");
        free_comm(created);
        return able ? ncclRemoteError : ncclUnhandledCudaError;
    }
    *comm = created;
    return ncclSuccess;
}

static ncclResult_t finish(ncclComm_t comm) {
    const cudaError_t result = cudaEventSynchronize(comm->last);
    return result == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

FAKE_NCCL_EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (comm == NULL) return ncclSuccess;
    const ncclResult_t result = finish(comm);
    free_comm(comm);
    return result;
}

FAKE_NCCL_EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (comm == NULL) return ncclSuccess;
    atomic_store(&comm->meeting.left, true);
    // The stream may still have to get to an operation that was enqueued; it must find its memory.
    const struct timespec pause = {0, kAbortPauseNs};
    while (atomic_load(&comm->waiting) > 0) nanosleep(&pause, NULL);
    return ncclCommDestroy(comm);
}

FAKE_NCCL_EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
    if (comm == NULL || count == NULL) return ncclInvalidArgument;
    *count = comm->meeting.num_ranks;
    return ncclSuccess;
}

FAKE_NCCL_EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    if (comm == NULL || rank == NULL) return ncclInvalidArgument;
    *rank = comm->meeting.rank;
    return ncclSuccess;
}

FAKE_NCCL_EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
    if (comm == NULL || device == NULL) return ncclInvalidArgument;
    *device = comm->device;
    return ncclSuccess;
}

FAKE_NCCL_EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
    if (comm == NULL || result == NULL) return ncclInvalidArgument;
    *result = atomic_load(&comm->failed) ? ncclRemoteError : ncclSuccess;
    return ncclSuccess;
}

// ---- Splitting ---------------------------------------------------------------------------------

// What a rank tells the others. Of the names of one colour, that of its first rank is used.
typedef struct {
    int color;
    int key;
    ncclUniqueId id;
} SplitWish;

// Ranks of a part are ordered by key, then by their rank before.
static bool is_before(const SplitWish* wishes, int a, int b) {
    return wishes[a].key != wishes[b].key ? wishes[a].key < wishes[b].key : a < b;
}

FAKE_NCCL_EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key,
                                            ncclComm_t* newcomm, ncclConfig_t* config) {
    (void)config;
    if (comm == NULL || newcomm == NULL) return ncclInvalidArgument;
    *newcomm = NULL;
    SplitWish wishes[kMeetingMaxRanks];
    SplitWish mine = {color, key, {{0}}};
    ncclResult_t result = ncclGetUniqueId(&mine.id);
    if (result == ncclSuccess) result = finish(comm);
    if (result != ncclSuccess) return result;
    if (!meeting_exchange(&comm->meeting, &mine, sizeof(mine), wishes, sizeof(mine))) return ncclRemoteError;
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    const int self = comm->meeting.rank;
    int first = self;
    int rank = 0;
    int count = 0;
    for (int i = 0; i < comm->meeting.num_ranks; ++i) {
        if (wishes[i].color != color) continue;
        ++count;
        if (is_before(wishes, i, self)) ++rank;
        if (is_before(wishes, i, first)) first = i;
    }
    return ncclCommInitRank(newcomm, count, wishes[first].id, rank);
}

FAKE_NCCL_EXPORT const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "a CUDA call failed";
        case ncclSystemError: return "a system call failed";
        case ncclInternalError: return "internal error";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        case ncclRemoteError: return "remote process failed or was lost";
        default: return "unknown result code";
    }
}
